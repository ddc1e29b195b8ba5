"""Drafts from a prediction: in step, after edits, and after a continuation elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.worker.protocol.speculation.prediction_drafter import NEAR, PredictionDrafter

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def draft(drafter: PredictionDrafter, most: int) -> list[int]:
    return drafter.draft(most).tolist() if drafter.ready else []


def after(prediction: list[int], output: list[int], most: int = 3) -> list[int]:
    """The draft after an output that arrived token by token."""
    drafter = PredictionDrafter(array(prediction), array([]))
    for token in output:
        _ = drafter.ready  # a search after each token, as in serving
        drafter.extend([token])
    return draft(drafter, most)


PREDICTION = [*range(100, 140)]


def test_it_begins_with_the_prediction() -> None:
    assert after(PREDICTION, [], 4) == [100, 101, 102, 103]
    assert after(PREDICTION, PREDICTION[:10]) == [110, 111, 112]
    assert after(PREDICTION, PREDICTION[:39]) == [139]
    assert after(PREDICTION, PREDICTION) == []


@pytest.mark.parametrize(
    ("output", "follows"),
    [
        ([*PREDICTION[:10], 7, *PREDICTION[11:12]], 112),  # one token replaced by one
        ([*PREDICTION[:10], 7, 8, 9, *PREDICTION[11:12]], 112),  # by several
        ([*PREDICTION[:10], 7, *PREDICTION[14:15]], 115),  # several by one
        ([*PREDICTION[:10], 7, 8, *PREDICTION[10:11]], 111),  # inserted: the place itself repeats
        ([*PREDICTION[:10], *PREDICTION[13:14]], 114),  # left out
        (
            [*PREDICTION[:10], 7, *PREDICTION[10 + NEAR + 5 : 10 + NEAR + 6]],
            None,
        ),  # one token, far away
        ([*PREDICTION[:10], 7, *PREDICTION[30:33]], 133),
        ([*PREDICTION[20:40], 7, *PREDICTION[:3]], 103),  # the parts in another order
    ],
)
def test_it_goes_on_behind_an_edit(output: list[int], follows: int | None) -> None:
    assert after(PREDICTION, output)[:1] == ([] if follows is None else [follows])


def test_of_equal_places_the_next_one_is_taken() -> None:
    line = [1, 2, 3, 4]
    prediction = [*line, 50, *line, 51, *line, 52]
    assert after(prediction, [*line, 50, *line, 51])[:1] == [1]
    assert after(prediction, [*line, 60, *line])[:1] == [51]


def test_wrong_places_do_not_move_the_edit() -> None:
    """Each token of the replacement occurs later, near the edit and near the wrong places."""
    prediction = [*range(100, 110), 1, 200, 2, 201, 3, 202, *range(110, 120)]
    output = [*range(100, 109), 1, 2, 3, 200]
    assert after(prediction, output)[:1] == [2]


def test_what_is_not_in_the_prediction_has_no_drafts() -> None:
    assert after(PREDICTION, [1, 2, 3, 4, 5]) == []
    assert after([], [1, 2, 3]) == []
    assert after([], []) == []


@given(prediction=TOKENS, output=TOKENS, most=st.integers(0, 9))
def test_a_draft_is_a_part_of_the_prediction_behind_the_last_token(
    prediction: list[int], output: list[int], most: int
) -> None:
    for drafts in (
        after(prediction, output, most),
        draft(PredictionDrafter(array(prediction), array(output)), most),
    ):
        before = [output[-1]] if output else []
        text = "".join(map(str, prediction))
        assert len(drafts) <= most
        assert "".join(map(str, before + drafts if drafts else [])) in text


@given(known=st.integers(3, 39), more=st.integers(0, 5))
def test_a_continuation_is_in_step_at_once(known: int, more: int) -> None:
    drafter = PredictionDrafter(array(PREDICTION), array(PREDICTION[:known]))
    assert draft(drafter, more) == PREDICTION[known : known + more]
