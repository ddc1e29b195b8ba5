"""The state of slots whose device drafts, while steps run ahead of results."""

from dataclasses import replace

import numpy as np

from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.speculation.sequence_drafts import FROM_DEVICE
from pagewire.worker.protocol.steps.device_drafts import UNTRIED_STEPS
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.slots import PlannedStep, Slots
from pagewire.worker.protocol.steps.step import Start, Step, StepSampling

LIMITS = Limits(
    vocab_size=100,
    num_slots=4,
    block_size=8,
    num_blocks=64,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_drafts=3,
    drafts_on_device=True,
)
# Rows cost nothing, so drafts are made whenever they may be right.
COSTS = RowCosts(np.array([1, 2, 4, 8, 16], np.int32), np.ones(5), 0.0)
NONE = np.empty(0, np.int32)


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Worker:
    """Slots, and steps that are in flight."""

    def __init__(self) -> None:
        self.slots = Slots(LIMITS, None, COSTS)
        self.number = 0

    def step(self, **fields: object) -> PlannedStep:
        self.number += 1
        defaults = {
            "starts": (),
            "append_slots": NONE,
            "append_blocks": NONE,
            "prefill_slots": NONE,
            "prefill_counts": NONE,
            "decode_slots": None,
        }
        return self.slots.plan(Step(self.number, **(defaults | fields)))  # type: ignore[arg-type]

    def start(
        self,
        slot: int,
        known: int,
        blocks: int,
        more: int = 20,
        prediction: Int32Array = NONE,
        salt: str = "",
        **sampling: object,
    ) -> DevicePlan:
        """Starts and prefills a sequence; its first token is answered."""
        start = Start(
            slot=slot,
            token_ids=np.arange(known, dtype=np.int32),
            num_generated=0,
            num_computed=0,
            blocks=np.arange(1 + 8 * slot, 1 + 8 * slot + blocks, dtype=np.int32),
            sampling=StepSampling(**sampling),  # type: ignore[arg-type]
            max_new_tokens=more,
            prediction=prediction,
            cache_salt=salt,
        )
        planned = self.step(
            starts=(start,), prefill_slots=array(slot), prefill_counts=array(known),
            decode_slots=NONE,
        )  # fmt: skip
        assert planned.plan.drafts is None
        self.answer(planned.plan, [1])
        return planned.plan

    def answer(self, plan: DevicePlan, counts: list[int], token: int = 0) -> None:
        """The result of a step: a number of tokens of each sequence."""
        firsts = np.flatnonzero(
            np.ones(len(plan.sample_slots)) if plan.drafts is None else plan.drafts == NO_DRAFT
        )
        rows = np.diff(firsts, append=len(plan.sample_slots))
        taken = np.concatenate(
            [np.arange(n) < count for n, count in zip(rows, counts, strict=True)]
        )
        right = np.array(counts) > 1
        tokens = np.full(len(taken), token, np.int32)
        self.slots.take(plan, tokens, None if plan.drafts is None else taken, right)


def test_rows_of_drafts_follow_their_sequences_row() -> None:
    worker = Worker()
    worker.start(0, known=10, blocks=8)
    worker.start(2, known=5, blocks=8)
    plan = worker.step(decode_slots=array(0, 2)).plan
    assert plan.drafts is not None
    assert plan.decode_slots.tolist() == [0] * 4 + [2] * 4
    assert plan.drafts.tolist() == 2 * [NO_DRAFT, FROM_DEVICE, FROM_DEVICE, FROM_DEVICE]
    assert plan.decode_positions.tolist() == [10, 11, 12, 13, 5, 6, 7, 8]
    assert plan.sample_indices.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_positions_are_what_is_known_when_a_step_is_planned() -> None:
    worker = Worker()
    worker.start(0, known=10, blocks=8)
    first = worker.step(decode_slots=array(0)).plan
    second = worker.step().plan
    assert second.decode_positions[0] == 11, "one token of each step in flight"
    worker.answer(first, [3])
    third = worker.step().plan
    assert third.decode_positions[0] == 14
    worker.answer(second, [4])
    worker.answer(third, [1])
    fourth = worker.step().plan
    assert fourth.decode_positions[0] == 18
    assert fourth.sample_indices[0] == 9
    assert (fourth.sample_indices - fourth.decode_positions == 1 - 10).all()


def test_drafts_fit_into_the_blocks_however_many_are_right() -> None:
    worker = Worker()
    worker.start(0, known=9, blocks=2, more=50)
    plan = worker.step(decode_slots=array(0)).plan
    assert plan.num_drafts == 3  # positions 9 to 12
    plan = worker.step().plan
    # The step before may have computed up to 12, so the first row is at 13 at most, of 16.
    assert plan.num_drafts == 2
    planned = worker.step()
    # The rows in flight may fill the blocks.
    assert not planned.plan.num_decodes
    assert "slot 0 has 2 blocks, too few" in planned.failures[0].message


def test_blocks_are_needed_up_to_the_last_token_only() -> None:
    worker = Worker()
    worker.start(0, known=9, blocks=2, more=8)  # the last token is at 16 and is not computed
    for _ in range(4):
        planned = worker.step(decode_slots=array(0))
        assert not planned.failures
        assert planned.plan.num_decodes


def test_a_sequence_that_surely_has_all_its_tokens_has_no_row() -> None:
    worker = Worker()
    worker.start(0, known=9, blocks=3, more=4)
    first = worker.step(decode_slots=array(0)).plan
    assert first.num_drafts == 2, "it gets three tokens more"
    worker.answer(first, [3])
    planned = worker.step()
    assert not planned.failures
    assert planned.plan.num_decodes == 0
    assert planned.rows is not None
    assert planned.rows.tolist() == [-1]


def test_sequences_with_penalties_have_no_drafts() -> None:
    worker = Worker()
    worker.start(0, known=10, blocks=8, presence_penalty=0.5)
    worker.start(1, known=10, blocks=8, bias_ids=array(3), biases=np.ones(1, np.float32))
    plan = worker.step(decode_slots=array(0, 1)).plan
    assert plan.decode_slots.tolist() == [0, 1, 1, 1, 1]


def test_steps_with_prompts_have_no_drafts() -> None:
    worker = Worker()
    worker.start(0, known=10, blocks=8)
    start = Start(
        slot=1, token_ids=np.arange(20, dtype=np.int32), num_generated=0, num_computed=0,
        blocks=array(20, 21, 22), sampling=StepSampling(), max_new_tokens=5,
    )  # fmt: skip
    planned = worker.step(
        starts=(start,), prefill_slots=array(1), prefill_counts=array(8), decode_slots=array(0)
    )
    assert planned.plan.drafts is None
    worker.answer(planned.plan, [1])
    planned = worker.step(prefill_slots=array(1), prefill_counts=array(12))
    worker.answer(planned.plan, [1, 1])
    assert worker.step(decode_slots=array(0, 1)).plan.num_drafts > 0


def test_drafts_that_are_wrong_end_and_come_back_once_they_would_be_right() -> None:
    worker = Worker()
    worker.slots = Slots(
        LIMITS, None, RowCosts(COSTS.rows, 1 + 0.1 * COSTS.rows.astype(float), 0.0)
    )
    worker.start(0, known=4, blocks=8, more=60)
    drafts = []
    for _ in range(12):
        plan = worker.step(decode_slots=array(0)).plan
        drafts.append(plan.num_drafts)
        worker.answer(plan, [1])
    assert drafts[0] > 0
    assert drafts[-3:] == [0, 0, 0]
    for _ in range(12):
        plan = worker.step().plan
        drafts.append(plan.num_drafts)
        if plan.drafts is None:  # its draft was not computed, and was right
            worker.slots.take(plan, np.zeros(1, np.int32), None, np.array([True]))
        else:
            worker.answer(plan, [1 + plan.num_drafts])
    assert drafts[-1] == 3


def test_a_draft_model_that_does_not_pay_is_tried_now_and_then() -> None:
    """Without its drafts there is no evidence whether they would be right."""
    worker = Worker()
    worker.slots = Slots(LIMITS, None, replace(COSTS, passes=np.ones(5)))
    worker.start(0, known=4, blocks=8, more=60)
    drafts = []
    for _ in range(UNTRIED_STEPS + 3):
        plan = worker.step(decode_slots=array(0)).plan
        drafts.append(plan.num_drafts)
        if plan.drafts is None:
            worker.slots.take(plan, np.zeros(1, np.int32), None, np.array([True]))
        else:
            worker.answer(plan, [1])
    assert [at for at, count in enumerate(drafts) if count] == [UNTRIED_STEPS - 1]
    assert max(drafts) == 1


def test_a_prediction_is_right_more_likely_before_the_first_results() -> None:
    rows = RowCosts(COSTS.rows, 1 + 0.3 * COSTS.rows.astype(float), 0.0)
    drafts = []
    for prediction in (NONE, array(1, 2, 3, 4)):
        worker = Worker()
        worker.slots = Slots(LIMITS, None, rows)
        worker.start(0, known=4, blocks=8, prediction=prediction)
        drafts.append(worker.step(decode_slots=array(0)).plan.num_drafts)
    assert drafts[0] < drafts[1]


def test_a_slot_that_is_taken_again_forgets_the_sequence_before() -> None:
    worker = Worker()
    worker.start(0, known=10, blocks=8)
    for _ in range(2):
        worker.answer(worker.step(decode_slots=array(0)).plan, [4])
    worker.step(decode_slots=NONE)
    worker.start(0, known=3, blocks=1, more=4)
    plan = worker.step(decode_slots=array(0)).plan
    assert plan.decode_positions[0] == 3
    assert plan.num_drafts == 2


def test_a_sequence_starts_with_recent_outputs_of_its_salt() -> None:
    def recent(plan: DevicePlan) -> list[int]:
        assert plan.starts is not None
        return plan.starts.sequences[0].recent.tolist()

    worker = Worker()
    assert recent(worker.start(0, known=6, blocks=8, salt="a")) == []
    worker.answer(worker.step(decode_slots=array(0)).plan, [3], token=7)
    late = worker.step().plan
    assert recent(worker.start(1, known=3, blocks=8, salt="a")) == [2, 3, 4, 5, 0, 7, 7, 7, -1], (
        "in `start` no sequence decodes, so the other one has ended"
    )
    worker.answer(late, [1], token=8)
    assert recent(worker.start(0, known=9, blocks=8, salt="b")) == []
    worker.answer(worker.step(decode_slots=array(1)).plan, [2], token=9)
    # The token of the late step is not kept as output.
    assert recent(worker.start(2, known=3, blocks=8, salt="a")) == (
        [2, 3, 4, 5, 0, 7, 7, 7, -1, 0, 1, 2, 0, 9, 9, -1]
    )
