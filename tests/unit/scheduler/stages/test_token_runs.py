"""Results with several tokens a row."""

import numpy as np
import pytest

from pagewire.packing import pack, pack_floats
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.stages.token_runs import TokenRuns
from pagewire.v1 import worker_pb2 as pb


def result(tokens: list[int], counts: list[int]) -> pb.StepResult:
    return pb.StepResult(
        step=3,
        token_ids=pack(tokens),
        token_counts=pack(counts),
        logprob_rows=pack([1, 4]),
        logprobs=pack_floats(np.float32([0.5, 0.25])),
    )


def test_tokens_are_taken_place_by_place() -> None:
    message = result([10, 20, 21, 22, 30, 31], [1, 3, 2])
    runs = TokenRuns.read(message, StepLogprobs.read(message), most=3)
    assert runs is not None
    tokens, logprobs = runs.first
    assert tokens.tolist() == [10, 20, 30]
    assert logprobs is not None
    assert logprobs.rows.tolist() == [1, 2]
    assert logprobs.ids.tolist() == [[20], [30]]
    second, third = runs.later()
    assert (second[0], third[0]) == (1, 2)
    assert second[1].tolist() == [1, 2]
    assert second[2].tolist() == [21, 31]
    assert third[1].tolist() == [1]
    assert third[2].tolist() == [22]
    assert runs.drafts is None


@pytest.mark.parametrize("counts", [[1, 3, 1], [0, 4, 2], [1, 4, 1], [1, 2, 2]])
def test_counts_that_cannot_be_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="step 3 has 6 tokens"):
        TokenRuns.read(result([10, 20, 21, 22, 30, 31], counts), None, most=3)


def drafted(rows: list[int], counts: list[int], drafters: list[int]) -> pb.StepResult:
    message = result([10, 20, 21, 22, 30, 31], [1, 3, 2])
    message.draft_rows, message.draft_counts = pack(rows), pack(counts)
    message.drafters = pack(drafters)
    return message


def test_drafts_of_predictions_are_told_from_others() -> None:
    predicted, other = pb.DRAFTER_PREDICTION, pb.DRAFTER_SUFFIX
    runs = TokenRuns.read(drafted([0, 1, 2], [2, 2, 1], [predicted, predicted, other]), None, 3)
    drafts = runs.drafts
    assert drafts is not None
    assert drafts.accepted.tolist() == [0, 2, 1]
    rows, wrong = drafts.rejected
    assert rows.tolist() == [0]
    assert wrong.tolist() == [2]
    # Of row 1 the first two tokens were drafts, and the third was drawn.
    assert [drafts.predicted_at(place).tolist() for place in range(3)] == [[1], [1], []]


@pytest.mark.parametrize(
    ("rows", "counts", "drafters", "part"),
    [
        ([1], [2, 2], [1], "1 rows with drafts, 2 numbers of drafts, and 1 drafters"),
        ([1], [2], [1, 1], "2 drafters"),
        ([1, 3], [2, 2], [1, 1], "row 3 of 3"),
        ([1], [1], [1], "1 drafts in row 1, 2 of them right"),
        ([1], [3], [1], "a row has at most 2"),
        ([1], [2], [-1], "drafters -1"),
        ([1], [2], [0], "drafters 0"),
        ([1], [2], [1 << 30], "known are 1 to"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    rows: list[int], counts: list[int], drafters: list[int], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        TokenRuns.read(drafted(rows, counts, drafters), None, most=3)
