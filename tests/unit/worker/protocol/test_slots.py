"""Slot state on the host: plans, malformed steps and bad sequences."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagewire.errors import Code, RequestError
from pagewire.packing import pack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.adjustments import (
    BIASED,
    IN_PROMPT,
    MAX_COUNTED,
    NO_TOKEN,
    PENALIZED,
)
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.slots import PlannedStep, Slots
from pagewire.worker.protocol.steps.step import (
    Start,
    Step,
    StepHostCopies,
    StepPrefixGroup,
    StepSampling,
    decode_step,
)

LIMITS = Limits(
    vocab_size=100,
    num_slots=4,
    block_size=4,
    num_blocks=20,
    max_model_len=32,
    max_num_batched_tokens=24,
    host_blocks=6,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start(slot: int, tokens: int, blocks: tuple[int, ...] = (), **changes: Any) -> Start:
    begin = Start(slot, np.arange(tokens, dtype=np.int32), 0, 0, ints(*blocks), StepSampling())
    return replace(begin, **changes)


def step(
    *starts: Start,
    append: tuple[tuple[int, int], ...] = (),
    prefill: tuple[tuple[int, int], ...] = (),
    decode: tuple[int, ...] | None = None,
) -> Step:
    return Step(
        number=1,
        starts=starts,
        append_slots=ints(*(slot for slot, _ in append)),
        append_blocks=ints(*(block for _, block in append)),
        prefill_slots=ints(*(slot for slot, _ in prefill)),
        prefill_counts=ints(*(count for _, count in prefill)),
        decode_slots=None if decode is None else ints(*decode),
    )


def copying(
    saved: tuple[int, ...] = (3,),
    host: tuple[int, ...] = (0,),
    loaded_host: tuple[int, ...] = (4,),
    loaded: tuple[int, ...] = (5,),
) -> Step:
    copies = StepHostCopies(ints(*saved), ints(*host), ints(*loaded_host), ints(*loaded))
    return replace(step(), host_copies=copies)


def biased(biases: dict[int, float]) -> StepSampling:
    return StepSampling(bias_ids=ints(*biases), biases=np.array([*biases.values()], np.float32))


@pytest.fixture
def slots() -> Slots:
    return Slots(LIMITS)


@pytest.fixture
def running(slots: Slots) -> Slots:
    """Slots 0 and 1 have 3 and 6 known tokens, all prefilled."""
    slots.plan(step(start(0, 3, (1,)), start(1, 6, (2, 3)), prefill=((0, 3), (1, 6))))
    return slots


def messages(planned: PlannedStep) -> dict[int, str]:
    assert not any(failure.retryable for failure in planned.failures)
    return {failure.slot: failure.message for failure in planned.failures}


def test_chunks_decodes_and_their_rows(slots: Slots) -> None:
    first = slots.plan(step(start(2, 7, (5, 6)), start(0, 3, (1,)), prefill=((2, 4), (0, 3))))
    chunks = first.plan.chunks
    assert chunks is not None
    assert chunks.slots.tolist() == [2, 0]
    assert chunks.starts.tolist() == [0, 4, 7]
    assert chunks.tokens.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert chunks.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert chunks.lengths.tolist() == [4, 3]
    assert chunks.samples.tolist() == [False, True]
    assert first.plan.sample_slots.tolist() == [0]
    assert first.plan.sample_indices.tolist() == [0]
    writes = first.plan.writes
    assert writes is not None
    assert [writes.slots.tolist(), writes.columns.tolist(), writes.blocks.tolist()] == [
        [2, 2, 0],
        [0, 1, 0],
        [5, 6, 1],
    ]

    second = slots.plan(step(prefill=((2, 3),), decode=(0,)))
    assert second.plan.decode_positions.tolist() == [3]
    assert second.plan.chunks is not None
    assert second.plan.chunks.positions.tolist() == [4, 5, 6]
    assert second.plan.sample_slots.tolist() == [0, 2]
    assert second.plan.sample_indices.tolist() == [1, 0]

    third = slots.plan(step(append=((0, 9),), decode=(2, 0)))
    assert third.plan.chunks is None
    assert third.plan.decode_slots.tolist() == [2, 0]
    assert third.plan.decode_positions.tolist() == [7, 4]
    assert third.plan.sample_indices.tolist() == [1, 2]
    assert third.plan.writes is not None
    assert third.plan.writes.columns.tolist() == [1]

    fourth = slots.plan(step(append=((2, 10),)))
    assert fourth.plan.decode_slots is third.plan.decode_slots
    assert fourth.plan.decode_positions.tolist() == [8, 5]
    assert all(planned.rows is None for planned in (first, second, third, fourth))
    assert not any(planned.failures for planned in (first, second, third, fourth))


def test_resumed_sequence_goes_on_with_its_index_and_its_cached_tokens(slots: Slots) -> None:
    resumed = start(1, 10, (4, 5, 6), num_generated=4, num_computed=8)
    planned = slots.plan(step(resumed, prefill=((1, 2),)))
    assert planned.plan.chunks is not None
    assert planned.plan.chunks.tokens.tolist() == [8, 9]
    assert planned.plan.chunks.positions.tolist() == [8, 9]
    assert planned.plan.sample_indices.tolist() == [4]


def test_several_blocks_for_one_slot_are_appended_in_order(slots: Slots) -> None:
    slots.plan(step(start(0, 20, (1,)), start(1, 20)))
    appended = ((1, 7), (0, 8), (1, 9), (0, 10), (1, 11))
    planned = slots.plan(step(append=appended, prefill=((0, 12), (1, 12))))
    assert planned.plan.writes is not None
    assert planned.plan.writes.columns.tolist() == [0, 1, 1, 2, 2]
    assert slots.blocks(0).tolist() == [1, 8, 10]
    assert slots.blocks(1).tolist() == [7, 9, 11]
    assert not planned.failures


def test_filters_are_looked_at_only_where_a_sampled_row_has_one(slots: Slots) -> None:
    filtered = start(0, 3, (1,), sampling=StepSampling(temperature=1.0, top_k=5))
    plain = start(1, 3, (2,), sampling=StepSampling(temperature=1.0))
    assert not slots.plan(step(filtered, plain, prefill=((0, 2), (1, 3)))).plan.filtered
    assert slots.plan(step(prefill=((0, 1),), decode=(1,))).plan.filtered


@pytest.mark.parametrize(
    ("malformed", "words"),
    [
        (step(decode=(4,)), "decode_slots names slot 4; this worker has slots 0 to 3"),
        (step(decode=(-1,)), "slot -1"),
        (step(decode=(0, 1, 0)), "decode_slots names a slot twice"),
        (step(prefill=((9, 1),)), "prefill_slots names slot 9"),
        (step(prefill=((0, 1), (0, 1))), "prefill_slots names a slot twice"),
        (step(prefill=((0, 0),)), "a chunk has 0 tokens"),
        (step(prefill=((0, -3),)), "a chunk has -3 tokens"),
        (step(prefill=((0, 25),)), "25 tokens; this worker takes at most 24"),
        (step(prefill=((2, 2**31 - 1), (3, 2**31 - 1))), "takes at most 24"),
        (step(append=((7, 1),)), "append_slots names slot 7"),
        (step(start(4, 3)), "starts names slot 4"),
        (step(start(2, 3), start(2, 3)), "starts names a slot twice"),
        (copying(saved=(0,)), "saved_blocks names block 0; this worker has blocks 1 to 19"),
        (copying(saved=(20,)), "saved_blocks names block 20"),
        (copying(saved=(3, 3), host=(0, 1)), "saved_blocks names a block twice"),
        (copying(host=(6,)), "saved_host_blocks names block 6; this worker has blocks 0 to 5"),
        (copying(saved=(3, 4), host=(2, 2)), "saved_host_blocks names a block twice"),
        (copying(loaded_host=(-1,)), "loaded_host_blocks names block -1"),
        (copying(loaded=(0,)), "loaded_blocks names block 0"),
        (copying(loaded_host=(1, 2), loaded=(7, 7)), "loaded_blocks names a block twice"),
    ],
)
def test_malformed_steps_are_refused_and_change_nothing(
    running: Slots, malformed: Step, words: str
) -> None:
    with pytest.raises(RequestError) as error:
        running.plan(malformed)
    assert error.value.code == Code.INVALID_ARGUMENT
    assert words in error.value.message
    planned = running.plan(step(append=((1, 4),), decode=(0, 1)))
    assert planned.plan.decode_positions.tolist() == [3, 6]
    assert not planned.failures


def test_budget_counts_decodes_that_go_on(running: Slots) -> None:
    running.plan(step(decode=(0, 1)))
    with pytest.raises(RequestError, match="computes 25 tokens"):
        running.plan(step(start(2, 23), prefill=((2, 23),)))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (start(2, 0), "0 known tokens; a sequence has 1 to 32"),
        (start(2, 33, tuple(range(1, 9))), "33 known tokens"),
        (start(2, 3, (1,), token_ids=ints(1, 100, 2)), "token id 100 is not in the vocabulary"),
        (start(2, 3, (1,), token_ids=ints(1, -1, 2)), "token id -1"),
        (start(2, 3, (0,)), "block 0 is none of this worker's blocks 1 to 19"),
        (start(2, 3, (20,)), "block 20"),
        (start(2, 3, tuple(range(1, 10))), "9 blocks; the longest sequence has 8"),
        (start(2, 3, (1,), num_computed=3), "num_computed 3 is not less than the 3"),
        (start(2, 6, (1,), num_computed=5), "num_computed 5 tokens do not fit into 1 blocks"),
        (start(2, 3, (1,), num_generated=4), "num_generated 4"),
        (start(2, 3, (1,), sampling=StepSampling(temperature=-1.0)), "temperature is -1.0"),
        (start(2, 3, (1,), sampling=StepSampling(temperature=float("nan"))), "temperature is nan"),
        (start(2, 3, (1,), sampling=StepSampling(top_p=0.0)), "top_p is 0; it must be above 0"),
        (start(2, 3, (1,), sampling=StepSampling(top_p=1.5)), "top_p is 1.5"),
        (start(2, 3, (1,), sampling=StepSampling(min_p=2.0)), "min_p is 2.0"),
        (start(2, 3, (1,), sampling=StepSampling(top_k=2**31)), "top_k is 2147483648"),
        (start(2, 3, (1,), sampling=StepSampling(stop_token_ids=(1,) * 17)), "17 stop_token_ids"),
        (start(2, 3, (1,), sampling=StepSampling(stop_token_ids=(100,))), "stop token id"),
        (
            start(2, 3, (1,), sampling=StepSampling(presence_penalty=math.nan)),
            "presence_penalty is nan",
        ),
        (
            start(2, 3, (1,), sampling=StepSampling(frequency_penalty=math.inf)),
            "frequency_penalty is inf",
        ),
        (
            start(2, 3, (1,), sampling=StepSampling(repetition_penalty=-1.0)),
            "repetition_penalty is -1.0",
        ),
        (start(2, 3, (1,), sampling=biased({1: math.nan})), "biases must be finite numbers"),
        (
            start(2, 3, (1,), sampling=biased({100: 1.0})),
            "bias_ids must ascend and be below the voc",
        ),
        (start(2, 3, (1,), sampling=biased({-1: 1.0})), "bias_ids must ascend"),
        (start(2, 3, (1,), sampling=biased({2: 1.0, 1: 1.0})), "bias_ids must ascend"),
        (start(2, 3, (1,), sampling=replace(biased({}), bias_ids=ints(1))), "1 bias_ids and 0"),
        (start(2, 3, (1,), sampling=biased(dict.fromkeys(range(301), 1.0))), "301 bias_ids"),
    ],
)
def test_bad_sequence_fails_alone(running: Slots, bad: Start, words: str) -> None:
    count = min(len(bad.token_ids), 20)
    prefill = ((2, count),) if count else ()
    planned = running.plan(step(bad, prefill=prefill, decode=(0,)))
    assert words in messages(planned)[2]
    assert planned.plan.sample_slots.tolist() == [0]
    assert planned.plan.chunks is None
    # Steps that were sent before the failure was reported are answered with -1, without a message.
    later = running.plan(step(append=((2, 8), (0, 9)), decode=(2, 0)))
    assert later.rows is not None
    assert later.rows.tolist() == [-1, 0]
    assert later.plan.decode_slots.tolist() == [0]
    assert not later.failures


def test_failed_chunks_answer_rows_as_if_they_were_computed(slots: Slots) -> None:
    bad, good = start(0, 6, (1, 0)), start(1, 6, (2, 3))
    first = slots.plan(step(bad, good, prefill=((0, 4), (1, 4))))
    assert list(messages(first)) == [0]
    assert first.rows is None  # neither chunk samples
    second = slots.plan(step(prefill=((0, 2), (1, 2))))
    assert second.rows is not None
    assert second.rows.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("wrong", "slot", "words", "rows"),
    [
        (step(decode=(3,)), 3, "slot 3 holds no sequence", [-1]),
        (step(prefill=((3, 2),)), 3, "slot 3 holds no sequence", [-1]),
        (step(append=((3, 5),)), 3, "slot 3 holds no sequence", None),
        (step(append=((0, 0),), decode=(0, 1)), 0, "block 0", [-1, 0]),
        (step(append=((0, 20),), decode=(0, 1)), 0, "block 20", [-1, 0]),
        (step(append=((0, 5),) * 8, decode=(0,)), 0, "more than 8 blocks", [-1]),
        (step(prefill=((0, 1),), decode=(1,)), 0, "has 3 known tokens; a chunk ends at 4", [0, -1]),
        (step(start(2, 3, (9,)), decode=(2, 1)), 2, "only 0 of its 3 tokens", [-1, 0]),
        (
            step(start(2, 3, (9,)), prefill=((2, 3),), decode=(2, 1)),
            2,
            "only 0 of its 3 tokens",
            [-1, 0, -1],
        ),
        (step(start(2, 9, (8, 9)), prefill=((2, 9),)), 2, "room for 8; a chunk ends at 9", [-1]),
    ],
)
def test_wrongly_named_slot_fails_alone(
    running: Slots, wrong: Step, slot: int, words: str, rows: list[int] | None
) -> None:
    planned = running.plan(wrong)
    assert list(messages(planned)) == [slot]
    assert words in messages(planned)[slot]
    assert (None if planned.rows is None else planned.rows.tolist()) == rows


def test_decode_needs_a_block_for_its_position(running: Slots) -> None:
    planned = running.plan(step(decode=(0,)))
    assert planned.plan.decode_positions.tolist() == [3]
    planned = running.plan(step())
    assert messages(planned) == {0: "slot 0 has 1 blocks, too few for position 4"}


def test_sequence_ends_at_max_model_len() -> None:
    slots = Slots(replace(LIMITS, max_model_len=30))
    slots.plan(step(start(0, 29, tuple(range(1, 9)), num_computed=20), prefill=((0, 9),)))
    assert slots.plan(step(decode=(0,))).plan.decode_positions.tolist() == [29]
    assert messages(slots.plan(step())) == {0: "slot 0 is full: max_model_len is 30 tokens"}


def test_new_start_forgets_the_failure(running: Slots) -> None:
    assert running.fail(0)
    assert not running.fail(0)
    assert running.plan(step(decode=(0,))).plan.num_decodes == 0
    planned = running.plan(step(start(0, 2, (7,)), prefill=((0, 2),), decode=()))
    assert planned.plan.sample_slots.tolist() == [0]
    assert not planned.failures


def test_absent_and_empty_decode_slots_differ(running: Slots) -> None:
    running.plan(decode_step(pb.Step(decode_slots=pack([0]))))
    assert running.plan(decode_step(pb.Step(append_slots=pack([0]), append_blocks=pack([5])))).plan
    assert running.plan(decode_step(pb.Step())).plan.num_decodes == 1
    assert running.plan(decode_step(pb.Step(decode_slots=b""))).plan.num_decodes == 0


GROUP = StepPrefixGroup(2, ints(0, 1, 2))


def members(planned: PlannedStep) -> list[tuple[int, list[int]]]:
    return [(group.blocks, group.slots.tolist()) for group in planned.plan.groups]


@pytest.fixture
def alike(slots: Slots) -> Slots:
    """Slots 0, 1 and 2 share blocks 1 and 2 and are prefilled."""
    starts = [start(s, 9, (1, 2, 3 + s, 6 + s, 9 + s), num_computed=8) for s in range(3)]
    slots.plan(step(*starts, prefill=((0, 1), (1, 1), (2, 1))))
    return slots


def test_groups_hold_for_the_slots_that_decode(alike: Slots) -> None:
    first = alike.plan(replace(step(decode=(0, 1, 2)), groups=(GROUP,)))
    assert members(first) == [(2, [0, 1, 2])]
    assert alike.plan(step()).plan.groups is first.plan.groups, "nothing has changed"
    assert members(alike.plan(step(decode=(2, 0)))) == [(2, [0, 2])]
    assert members(alike.plan(step(decode=(1,)))) == []
    assert members(alike.plan(step(decode=(0, 1)))) == [(2, [0, 1])]
    assert members(alike.plan(replace(step(), groups=()))) == []
    assert members(alike.plan(step())) == []


def test_a_failed_slot_is_in_no_group(alike: Slots) -> None:
    alike.plan(replace(step(decode=(0, 1, 2)), groups=(GROUP,)))
    alike.fail(1)
    assert members(alike.plan(step())) == [(2, [0, 2])]


def test_a_group_whose_blocks_differ_is_left_out(alike: Slots) -> None:
    groups = (GROUP, StepPrefixGroup(3, ints(0, 1)), StepPrefixGroup(4, ints(0, 2)))
    assert members(alike.plan(replace(step(decode=(0, 1, 2)), groups=groups))) == [(2, [0, 1, 2])]


@pytest.mark.parametrize("slots_named", [(0, 4), (-1, 2), (1, 1)])
def test_a_group_of_slots_that_are_none_is_refused(
    alike: Slots, slots_named: tuple[int, int]
) -> None:
    with pytest.raises(RequestError, match="group_slots") as raised:
        alike.plan(replace(step(), groups=(StepPrefixGroup(1, ints(*slots_named)),)))
    assert raised.value.code == Code.INVALID_ARGUMENT


def test_a_copied_block_goes_to_the_block_of_the_first_computed_token(slots: Slots) -> None:
    planned = slots.plan(
        step(
            start(0, 7, (1, 2), num_computed=6, copied_block=9),
            start(1, 3, (3,)),
            start(2, 3, (4,), num_computed=2, copied_block=9),
            prefill=((0, 1), (1, 3), (2, 1)),
        )
    )
    copies = planned.plan.copies
    assert copies is not None
    assert copies.sources.tolist() == [9, 9]
    assert copies.targets.tolist() == [2, 4]
    assert slots.plan(step(decode=(0, 1))).plan.copies is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_computed": 2, "copied_block": 20}, "block 20 is none of this worker's"),
        ({"num_computed": 4, "copied_block": 9}, "num_computed 4 is at a block's start"),
        ({"num_computed": 0, "copied_block": 9}, "num_computed 0 is at a block's start"),
    ],
)
def test_a_bad_copy_fails_its_sequence_alone(slots: Slots, changes: dict, message: str) -> None:
    planned = slots.plan(step(start(0, 7, (1, 2), **changes), start(1, 3, (3,))))
    assert list(messages(planned)) == [0]
    assert message in messages(planned)[0]
    assert planned.plan.copies is None


def test_copies_with_the_host_reach_the_backend(slots: Slots) -> None:
    copies = slots.plan(copying()).plan.host_copies
    assert copies is not None
    assert [part.tolist() for part in (copies.saved, copies.saved_host)] == [[3], [0]]
    assert [part.tolist() for part in (copies.loaded_host, copies.loaded)] == [[4], [5]]


def test_a_host_block_is_loaded_and_saved_to_in_one_step(slots: Slots) -> None:
    """All saves are first, so the load reads the content that was just saved."""
    planned = slots.plan(copying(host=(4,), loaded_host=(4,)))
    assert planned.plan.host_copies is not None


def test_only_starts_with_adjustments_say_more_of_them(slots: Slots) -> None:
    penalized = StepSampling(frequency_penalty=0.5)
    known = {"token_ids": ints(7, 5, 7, 9, 9, 7), "num_generated": 3}
    plan = slots.plan(
        step(
            start(0, 3, (1,)),
            start(2, 6, (2, 3), sampling=penalized, **known),
            start(1, 3, (4,), sampling=biased({2: -1.0, 90: 4.0})),
            prefill=((0, 3), (1, 3), (2, 6)),
        )
    ).plan
    assert plan.filtered
    assert plan.starts is not None
    assert plan.starts.adjustment_kinds.tolist() == [0, PENALIZED, BIASED]
    assert plan.starts.penalized is not None
    assert plan.starts.penalized.slots.tolist() == [2]
    assert plan.starts.penalized.penalties.tolist() == [[1.0, 0.5, 0.0]]
    assert plan.starts.penalized.seen_slots.tolist() == [2, 2, 2]
    seen = zip(plan.starts.penalized.seen_ids, plan.starts.penalized.seen_counts, strict=True)
    assert dict(seen) == {5: IN_PROMPT, 7: IN_PROMPT + 1, 9: 2}
    assert plan.starts.biased is not None
    assert plan.starts.biased.slots.tolist() == [1]
    assert plan.starts.biased.ids[0, :3].tolist() == [2, 90, NO_TOKEN]
    assert plan.starts.biased.biases[0, :3].tolist() == [-1.0, 4.0, 0.0]
    # Only rows that sample count.
    assert not slots.plan(step(decode=(0,))).plan.filtered
    assert slots.plan(step(decode=(0, 1))).plan.filtered
    plain = slots.plan(step(start(2, 3, (5,)), prefill=((2, 3),), decode=())).plan
    assert plain.starts is not None
    assert (plain.starts.penalized, plain.starts.biased, plain.filtered) == (None, None, False)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_repetition_penalty_of_0_or_1_is_none(slots: Slots, off: float) -> None:
    sampling = pb.SlotSampling(top_p=1.0, repetition_penalty=off)
    begin = pb.SequenceStart(token_ids=pack([1, 2, 3]), blocks=pack([1]), sampling=sampling)
    message = pb.Step(step=1, starts=[begin], prefill_slots=pack([0]), prefill_counts=pack([3]))
    plan = slots.plan(decode_step(message)).plan
    assert plan.starts is not None
    assert plan.starts.penalized is None
    assert not plan.filtered


def test_what_is_counted_of_a_token_has_an_end() -> None:
    long = Slots(replace(LIMITS, max_model_len=70_000, num_blocks=20_000))
    tokens = np.full(40_000, 7, np.int32)
    sampling = StepSampling(presence_penalty=1.0)
    begin = start(0, 0, sampling=sampling, token_ids=tokens, num_generated=39_999)
    plan = long.plan(step(begin)).plan
    assert plan.starts is not None
    assert plan.starts.penalized is not None
    assert plan.starts.penalized.seen_counts.tolist() == [IN_PROMPT + MAX_COUNTED]
