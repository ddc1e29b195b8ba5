"""Rows of a step with drafts, in its plan and in its answer."""

from dataclasses import replace

import numpy as np
import pytest

from pagewire.packing import unpack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan, dummy_plan
from pagewire.worker.protocol.steps.draft_rows import (
    DraftReport,
    TakenRows,
    first_rows,
    taken_counts,
    with_drafts,
)
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs

LIMITS = Limits(100, 8, 4, 20, 32, 64, max_drafts=3)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def plan() -> DevicePlan:
    """Slots 4, 2 and 7 decode, with 2, no and 1 drafts; a chunk samples for slot 1."""
    plain = replace(
        dummy_plan(LIMITS, decodes=3, chunks=1, chunk_length=2),
        decode_slots=ints(4, 2, 7),
        decode_positions=ints(10, 20, 5),
        sample_slots=ints(4, 2, 7, 1),
        sample_indices=ints(3, 9, 1, 0),
        logprobs=LogprobRows(ints(0, 3), 1),
    )
    return with_drafts(plain, [ints(50, 51), ints(), ints(60)], [1, 3, 2])


def test_each_draft_is_a_row_of_its_slot(plan: DevicePlan) -> None:
    assert plan.decode_slots.tolist() == [4, 4, 4, 2, 7, 7]
    assert plan.decode_positions.tolist() == [10, 11, 12, 20, 5, 6]
    assert plan.drafts is not None
    assert plan.drafts.tolist() == [NO_DRAFT, 50, 51, NO_DRAFT, NO_DRAFT, 60]
    assert plan.num_drafts == 3
    assert plan.sample_slots.tolist() == [4, 4, 4, 2, 7, 7, 1]
    assert plan.sample_indices.tolist() == [3, 4, 5, 9, 1, 2, 0]
    assert plan.logprobs is not None
    assert plan.logprobs.rows.tolist() == [0, 1, 2, 6]
    assert plan.sample_rows().tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert plan.sample_lengths()[:6].tolist() == [11, 12, 13, 21, 6, 7]
    assert first_rows(plan).tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("failed", [False, True])
def test_rows_that_are_not_taken_are_left_out_of_the_answer(plan: DevicePlan, failed: bool) -> None:
    taken = np.array([1, 1, 0, 1, 1, 0, 1], np.bool_)
    assert taken_counts(plan, taken).tolist() == [2, 1, 1, 1]
    logprobs = Logprobs(ints(0, 1, 2, 6), np.float32([0, 1, 2, 6]), ints(9, 9, 9, 9)[:, None],
                        np.zeros((4, 1), np.float32))  # fmt: skip
    drawn = ints(50, 8, 9, 30, 70, 71, 80)
    # The answer has a row of a failed sequence between those of slots 2 and 7.
    answered = ints(0, 1, -1, 2, 3) if failed else None
    rows = TakenRows.of(plan, taken, drawn, logprobs, answered)
    assert rows.tokens.tolist() == [50, 8, 30, 70, 80]
    assert rows.slots.tolist() == [4, 4, 2, 7, 1]
    if failed:
        assert rows.counts.tolist() == [2, 1, 1, 1, 1]
        assert rows.rows is not None
        assert rows.rows.tolist() == [0, 1, 2, -1, 3, 4]
    else:
        assert rows.counts.tolist() == [2, 1, 1, 1]
        assert rows.rows is None
    assert rows.logprobs is not None
    fields = rows.logprobs.fields(rows.tokens, rows.rows)
    assert unpack(fields["logprob_rows"]).tolist() == [0, 1, 5 if failed else 4]
    assert np.frombuffer(fields["logprobs"], np.float32).tolist() == [0, 1, 6]


@pytest.mark.parametrize("failed", [False, True])
def test_the_report_names_the_rows_of_the_answer(plan: DevicePlan, failed: bool) -> None:
    taken = np.array([1, 1, 0, 1, 1, 0, 1], np.bool_)
    report = DraftReport.of(plan, taken)
    assert report.drafted.tolist() == [2, 1]
    assert report.accepted.tolist() == [1, 0]
    assert report.drafters.tolist() == [pb.DRAFTER_SUFFIX, pb.DRAFTER_PREDICTION]
    # The answer has a row of a failed sequence between those of slots 2 and 7.
    fields = report.fields(ints(0, 1, -1, 2, 3) if failed else None)
    assert unpack(fields["draft_rows"]).tolist() == [0, 3 if failed else 2]
    assert unpack(fields["draft_counts"]).tolist() == [2, 1]
    assert unpack(fields["drafters"]).tolist() == [pb.DRAFTER_SUFFIX, pb.DRAFTER_PREDICTION]


def test_a_device_may_have_had_fewer_drafts_than_rows(plan: DevicePlan) -> None:
    taken = np.array([1, 1, 0, 1, 1, 0, 1], np.bool_)
    made_by = ints(pb.DRAFTER_PREDICTION, pb.DRAFTER_SUFFIX, 0, 0)
    report = DraftReport.of(replace(plan, drafters=None), taken, ints(1, 0, 0, 0), made_by)
    assert report.sequences.tolist() == [0]
    assert report.drafted.tolist() == [1]
    assert report.accepted.tolist() == [1]
    assert report.drafters.tolist() == [pb.DRAFTER_PREDICTION]
