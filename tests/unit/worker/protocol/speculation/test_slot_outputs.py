"""Outputs of slots: published as a whole when they end, under their own salt."""

import numpy as np

from pagewire.worker.protocol.speculation import slot_outputs
from pagewire.worker.protocol.speculation.slot_outputs import QUEUED, SEARCHED, SlotOutputs


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NONE = array()


def test_an_output_is_recent_when_its_slot_runs_no_more() -> None:
    outputs = SlotOutputs(3)
    outputs.start(0, "a", array(*range(10)))
    outputs.start(2, "a", array(7, 8))
    outputs.add(array(0, 0, 2), array(50, 51, 60))
    outputs.add(array(2, 2, 0), array(61, 62, 52))
    outputs.publish(array(0, 2))
    assert outputs.recent("a").tolist() == []
    outputs.publish(array(2))
    assert outputs.recent("a").tolist() == [6, 7, 8, 9, 50, 51, 52, -1]
    outputs.add(array(2), array(63))
    outputs.publish(NONE)
    assert outputs.recent("a").tolist() == [6, 7, 8, 9, 50, 51, 52, -1, 7, 8, 60, 61, 62, 63, -1]
    outputs.publish(NONE)
    assert len(outputs.recent("a")) == 15, "once"


def test_no_output_is_seen_under_another_salt() -> None:
    outputs = SlotOutputs(2)
    for salt in ("a", "b", ""):
        outputs.start(0, salt, array(1, 2, 3, 4))
        outputs.add(array(0, 0), array(5, 6))
        outputs.publish(NONE)
        assert outputs.recent(salt).tolist() == [1, 2, 3, 4, 5, 6, -1]
    assert outputs.recent("c").tolist() == []
    outputs.start(1, "d", array(9, 9, 9, 9))
    outputs.add(array(1), array(8))
    outputs.start(1, "e", array(7, 7, 7, 7))  # without `publish`, the former sequence is dropped
    outputs.publish(NONE)
    assert outputs.recent("d").tolist() == []


def test_the_last_tokens_of_a_long_output_are_kept() -> None:
    outputs = SlotOutputs(2)
    outputs.start(0, "a", array(1, 2, 3, 4))
    count = SEARCHED + 700
    for begin in range(0, count, 7):
        tokens = np.arange(begin, min(begin + 7, count), dtype=np.int32)
        outputs.add(np.zeros(len(tokens), np.int32), tokens)
        assert len(outputs._results) < QUEUED
    outputs.publish(NONE)
    assert outputs.recent("a").tolist() == [*range(count - SEARCHED + 1, count), -1]


def test_a_queue_has_no_more_tokens_of_a_slot_than_are_kept() -> None:
    assert QUEUED * 16 <= slot_outputs.SEARCHED  # a step has at most 15 drafts
