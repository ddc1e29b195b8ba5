"""The drafter of each row's drafts, and the effect of results on drafters."""

import numpy as np

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.speculation.recent_outputs import MATCH, RecentOutputs
from pagewire.worker.protocol.speculation.sequence_drafts import (
    FROM_DEVICE,
    PUBLISHED,
    SequenceDrafts,
)

MOST = 7


def array(tokens: list[int] | range) -> np.ndarray:
    return np.array(tokens, np.int32)


def drafts(
    prompt: list[int] | range = (),
    prediction: list[int] | range = (),
    recent: RecentOutputs | None = None,
    model_cost: float | None = None,
) -> SequenceDrafts:
    known, recent = array([*prompt]), recent or RecentOutputs()
    return SequenceDrafts(known, len(known), array([*prediction]), recent, MOST, model_cost)


def test_a_prediction_comes_before_what_the_sequence_had() -> None:
    made = drafts([1, 2, 3, 4, 5, 6, 1, 2, 3], prediction=range(50, 60))
    assert made.draft(1, 3).tolist() == [50, 51, 52]
    assert made.drafter == pb.DRAFTER_PREDICTION
    made.extend(array([4]), 3)
    assert made.draft(1, 2).tolist() == [5, 6]
    assert made.drafter == pb.DRAFTER_SUFFIX


def test_recent_outputs_come_last() -> None:
    recent = RecentOutputs()
    recent.add(array(range(80, 99)))
    made = drafts([80, 81, 82, 83], recent=recent)
    assert made.draft(1, 3).tolist() == [84, 85, 86]
    assert made.drafter == pb.DRAFTER_RECENT


def test_the_text_of_a_grammar_wins_unless_another_goes_on_behind_it() -> None:
    made = drafts([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert made.draft(1, MOST, [9, 8]).tolist() == [9, 8]
    assert made.drafter == pb.DRAFTER_GRAMMAR
    assert made.draft(1, 1, [9, 8]).tolist() == [9]
    assert made.draft(1, 3, [4, 5]).tolist() == [4, 5, 6]
    assert made.drafter == pb.DRAFTER_SUFFIX
    assert made.draft(1, 3, [4, 9]).tolist() == [4, 9]


def test_wrong_drafts_of_one_drafter_do_not_silence_another() -> None:
    made = drafts([1, 2, 3, 4, 1, 2, 3], prediction=[7] * 200)
    # Like a model that repeats its prompt: the prediction is wrong each time that it is tried.
    repeated, tried = [4, 1, 2, 3] * 30, 0
    for token in repeated:
        tokens = made.draft(1, MOST)
        if made.drafter == pb.DRAFTER_PREDICTION and len(tokens):
            tried += 1
        right = len(tokens) > 0 and tokens[0] == token
        made.extend(array([token]), 1 if len(tokens) else 0)
        assert right or len(tokens) == 0 or made.drafter == pb.DRAFTER_PREDICTION
    assert tried < 5


def test_output_is_published_in_pieces_and_the_prompt_is_not() -> None:
    recent = RecentOutputs()
    made = drafts(range(500, 540), recent=recent)
    made.extend(array([1]), 0)
    for token in range(2, PUBLISHED):
        made.extend(array([token]), 0)
        assert recent.draft(array(range(token - 4, token)), 1).tolist() == []
    made.extend(array([PUBLISHED]), 0)
    assert recent.draft(array([5, 6, 7, 8]), 3).tolist() == [9, 10, 11]
    # The first tokens of an output are found from the end of its prompt.
    assert recent.draft(array(range(536, 540)), 2).tolist() == [1, 2]
    assert recent.draft(array(range(510, 514)), 2).tolist() == []
    made.extend(array([70, 71, 72]), 0)
    assert recent.draft(array([62, 63, 64, 70]), 1).tolist() == []
    made.publish()
    assert recent.draft(array([62, 63, 64, 70]), 2).tolist() == [71, 72]
    before = recent._end
    made.publish()
    assert recent._end == before
    assert MATCH == 4


def test_a_draft_model_drafts_where_no_other_drafter_does() -> None:
    made = drafts([1, 2, 3, 4, 5, 6, 1, 2, 3], model_cost=0.1)
    assert made.draft(1, 3).tolist() == [4, 5, 6]
    assert made.drafter == pb.DRAFTER_SUFFIX
    made.extend(array([90]), 3)
    assert made.draft(1, 1).tolist() == [FROM_DEVICE]
    assert made.drafter == pb.DRAFTER_DRAFT_MODEL
    assert made.draft(1, 0).tolist() == []
    # Its drafts are not tokens yet, so a text that a grammar forces has precedence.
    assert made.draft(1, MOST, [9, 8]).tolist() == [9, 8]
    assert made.drafter == pb.DRAFTER_GRAMMAR


def test_a_draft_model_comes_before_drafters_that_are_wrong_more_often() -> None:
    made = drafts([1, 2, 3, 4] * 3 + [1, 2, 3], model_cost=0.1)
    drafters = []
    for number in range(60):  # it repeats itself every eight tokens, and not in between
        tokens = made.draft(1, MOST)
        drafters.append(made.drafter if len(tokens) else 0)
        right = len(tokens) > 0 and made.drafter == pb.DRAFTER_DRAFT_MODEL
        given = [1, 2, 3, 90 + number]
        made.extend(array(given[: 1 + len(tokens)] if right else [given[number % 4]]), len(tokens))
    assert pb.DRAFTER_SUFFIX in drafters[:10]
    assert set(drafters[-20:]) == {pb.DRAFTER_DRAFT_MODEL}


def test_a_draft_model_that_costs_a_whole_step_is_only_tried() -> None:
    made = drafts(range(1, 9), model_cost=1.0)
    tried = 0
    for token in range(100, 180):
        tokens = made.draft(1, MOST)
        tried += len(tokens)
        made.extend(array([token]), len(tokens))
    assert 1 <= tried <= 3
