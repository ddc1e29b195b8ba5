"""Sequences that release blocks behind the window: a worker's checks, writes and scrubbing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagewire.errors import RequestError
from pagewire.packing import pack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.slots import PlannedStep, Slots
from pagewire.worker.protocol.steps.step import Start, Step, StepSampling, decode_step

# A token at position p sees those from p - 5 on.
LIMITS = Limits(
    vocab_size=100,
    num_slots=3,
    block_size=4,
    num_blocks=20,
    max_model_len=64,
    max_num_batched_tokens=64,
    window=6,
)
EMPTY = np.empty(0, np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step(*starts: Start, **arrays: Any) -> Step:
    whole = Step(1, starts, EMPTY, EMPTY, EMPTY, EMPTY, None)
    return replace(whole, **{name: ints(*values) for name, values in arrays.items()})


def start(tokens: int, blocks: tuple[int, ...], computed: int = 0) -> Start:
    known = np.arange(tokens, dtype=np.int32)
    return Start(0, known, 0, computed, ints(*blocks), StepSampling())


@pytest.fixture
def slots() -> Slots:
    """Slot 0 has computed 14 tokens; its next one, at position 14, sees those from 9 on."""
    running = Slots(LIMITS)
    first = step(start(14, (1, 2, 3, 4)), prefill_slots=(0,), prefill_counts=(14,))
    assert not running.plan(first).failures
    return running


def writes(planned: PlannedStep) -> list[tuple[int, int, int]]:
    found = planned.plan.writes
    assert found is not None
    return list(zip(found.slots, found.columns, found.blocks, strict=True))


def test_the_table_names_the_scratch_block_in_the_place_of_those_given_up(slots: Slots) -> None:
    planned = slots.plan(step(freed_slots=(0,), freed_counts=(1,), decode_slots=(0,)))
    assert writes(planned) == [(0, 0, 0)]
    assert slots.blocks(0).tolist() == [2, 3, 4], "a failed sequence's blocks that are scrubbed"
    both = {"append_slots": (0,), "append_blocks": (1,)}
    planned = slots.plan(step(freed_slots=(0,), freed_counts=(2,), **both))
    assert writes(planned) == [(0, 1, 0), (0, 4, 1)], "in one step, for the same sequence"
    assert not planned.failures
    assert slots.blocks(0).tolist() == [3, 4, 1]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, "first 3 blocks; it has given up 0, and its token 14 sees those from number 2 on"),
        (0, "gives up its first 0 blocks"),
        (-1, "gives up its first -1 blocks"),
    ],
)
def test_blocks_that_the_next_token_sees_are_kept(slots: Slots, count: int, words: str) -> None:
    planned = slots.plan(step(freed_slots=(0,), freed_counts=(count,)))
    (failure,) = planned.failures
    assert planned.plan.writes is None
    assert words in failure.message


def test_what_is_given_up_is_not_given_up_again(slots: Slots) -> None:
    slots.plan(step(freed_slots=(0,), freed_counts=(2,)))
    (failure,) = slots.plan(step(freed_slots=(0,), freed_counts=(2,))).failures
    assert "it has given up 2" in failure.message


def test_an_empty_slot_has_nothing_to_give_up(slots: Slots) -> None:
    (failure,) = slots.plan(step(freed_slots=(1,), freed_counts=(1,))).failures
    assert failure.message == "slot 1 holds no sequence"


def test_without_a_window_every_block_is_kept() -> None:
    whole = Slots(replace(LIMITS, window=0))
    whole.plan(step(start(14, (1, 2, 3, 4)), prefill_slots=(0,), prefill_counts=(14,)))
    (failure,) = whole.plan(step(freed_slots=(0,), freed_counts=(1,))).failures
    assert "sees those from number 0 on" in failure.message
    (failure,) = whole.plan(step(start(14, (0, 2, 3, 4), computed=12))).failures
    assert failure.message == "block 0 is none of this worker's blocks 1 to 19"


def test_a_sequence_starts_without_the_blocks_behind_its_window() -> None:
    slots = Slots(LIMITS)
    planned = slots.plan(
        step(start(14, (0, 2, 3, 4), computed=12), prefill_slots=(0,), prefill_counts=(2,))
    )
    assert not planned.failures
    assert writes(planned) == [(0, 0, 0), (0, 1, 2), (0, 2, 3), (0, 3, 4)]
    assert slots.blocks(0).tolist() == [2, 3, 4]
    (failure,) = slots.plan(step(start(14, (0, 0, 3, 4), computed=12))).failures
    assert failure.message == (
        "its first 2 blocks are missing, and token 12 sees those from number 1 on"
    )
    (failure,) = slots.plan(step(start(14, (0, 2, 0, 4), computed=12))).failures
    assert failure.message == "block 0 is none of this worker's blocks 1 to 19"


def test_malformed_arrays_are_refused(slots: Slots) -> None:
    with pytest.raises(RequestError, match="freed_slots names slot 7"):
        slots.plan(step(freed_slots=(7,), freed_counts=(1,)))
    with pytest.raises(RequestError, match="freed_slots names a slot twice"):
        slots.plan(step(freed_slots=(0, 0), freed_counts=(1, 2)))
    message = pb.Step(step=1, freed_slots=pack([0, 1]), freed_counts=pack([1]))
    with pytest.raises(RequestError, match="freed_counts has 1 values and freed_slots 2"):
        decode_step(message)
