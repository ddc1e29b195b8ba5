"""The rows of a step with drafts: of its plan, and of its answer.

A decode row with k drafts becomes 1 + k decode rows of its slot, one position after the other. The
first has the slot's last token as its input, the others the drafts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array, pack
from pagewire.worker.protocol.speculation.sequence_drafts import FROM_DEVICE, NO_DRAFTER
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs


def with_drafts(plan: DevicePlan, drafts: list[Int32Array], drafters: list[int]) -> DevicePlan:
    """The plan with the drafts of each decode row `[decodes]`; at least one row has drafts.

    `drafters [decodes]` is the Drafter (worker.proto) of each row with drafts. A draft model's
    drafts are FROM_DEVICE: the device makes them when the step is computed.
    """
    counts = np.array([1 + len(each) for each in drafts], np.int32)
    return _with_rows(plan, counts, drafts, np.array(drafters, np.int32))


def with_device_drafts(plan: DevicePlan, lengths: Int32Array) -> DevicePlan:
    """The plan with `lengths [decodes]` drafts after each decode row, made by the device."""
    drafts = [np.full(lengths.sum(), FROM_DEVICE, np.int32)]
    return _with_rows(plan, 1 + lengths, drafts, None)


def _with_rows(
    plan: DevicePlan, counts: Int32Array, drafts: list[Int32Array], drafters: Int32Array | None
) -> DevicePlan:
    """The plan with `counts [decodes]` rows in place of each decode row; see `with_drafts`."""
    places = places_of(counts)
    tokens = np.full(len(places), NO_DRAFT, np.int32)
    tokens[places > 0] = np.concatenate(drafts)
    # The sampling rows of chunks follow the decode rows.
    all_counts = np.ones(len(plan.sample_slots), np.int32)
    all_counts[: len(counts)] = counts
    made_by = None
    if drafters is not None:
        made_by = np.full(len(all_counts), NO_DRAFTER, np.int32)
        made_by[: len(counts)] = np.where(counts > 1, drafters, NO_DRAFTER)
    firsts = np.cumsum(all_counts, dtype=np.int32) - all_counts
    logprobs, masks = plan.logprobs, plan.masks
    if logprobs is not None:
        wanted = np.zeros(len(all_counts), np.bool_)
        wanted[logprobs.rows] = True
        rows = np.flatnonzero(np.repeat(wanted, all_counts)).astype(np.int32)
        logprobs = LogprobRows(rows, logprobs.num_top)
    if masks is not None:
        masks = replace(masks, rows=firsts[masks.rows])
    return replace(
        plan,
        decode_slots=np.repeat(plan.decode_slots, counts),
        decode_positions=np.repeat(plan.decode_positions, counts) + places,
        drafts=tokens,
        sample_slots=np.repeat(plan.sample_slots, all_counts),
        sample_indices=np.repeat(plan.sample_indices, all_counts) + places_of(all_counts),
        logprobs=logprobs,
        masks=masks,
        drafters=made_by,
    )


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The sampling rows of a step whose tokens belong to outputs, arranged for the answer."""

    slots: Int32Array  # [taken]
    tokens: Int32Array  # [taken]
    logprobs: Logprobs | None
    # [tokens of the answer], the taken row of each, -1 for a failed sequence; None: all, in order.
    rows: Int32Array | None
    counts: Int32Array  # [rows of the answer], the number of tokens of each

    @classmethod
    def of(
        cls,
        plan: DevicePlan,
        taken: NDArray[np.bool_],
        tokens: Int32Array,
        logprobs: Logprobs | None,
        rows: Int32Array | None,
    ) -> "TakenRows":
        """The rows of a plan with drafts that are `taken [rows]`, of the rows of its outcome.

        `rows` as in `PlannedStep`.
        """
        counts = taken_counts(plan, taken)
        places = None
        if rows is not None:
            counts = np.append(counts, np.int32(1))[rows]  # a failed sequence has one token, -1
            computed = np.repeat(rows >= 0, counts)
            places = np.where(computed, np.cumsum(computed) - 1, -1).astype(np.int32)
        if logprobs is not None:
            kept = taken[logprobs.rows]
            own_rows = (np.cumsum(taken, dtype=np.int32) - 1)[logprobs.rows[kept]]
            logprobs = replace(
                logprobs,
                rows=own_rows,
                chosen=logprobs.chosen[kept],
                top_ids=logprobs.top_ids[kept],
                top=logprobs.top[kept],
            )
        counts = counts.astype(np.int32)
        return cls(plan.sample_slots[taken], tokens[taken], logprobs, places, counts)


def taken_counts(plan: DevicePlan, taken: NDArray[np.bool_]) -> Int32Array:
    """The number `[sequences]` of rows of each sequence of a plan with drafts in `taken [rows]`."""
    firsts = first_rows(plan)
    counts: Int32Array = np.add.reduceat(taken, firsts, dtype=np.int32)
    return counts


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The drafts of a step, and the number of right ones, `[sequences with drafts]`, in order."""

    sequences: NDArray[np.intp]  # places among the sequences that sample
    drafters: Int32Array
    drafted: Int32Array
    accepted: Int32Array

    @classmethod
    def of(
        cls,
        plan: DevicePlan,
        taken: NDArray[np.bool_],
        drafted: Int32Array | None = None,
        drafters: Int32Array | None = None,
    ) -> "DraftReport":
        """The report of a plan with drafts whose rows are `taken [rows]`.

        `drafted` and `drafters` as in `Outcome`.
        """
        if drafted is None:
            rows = np.diff(first_rows(plan), append=len(plan.sample_slots))
            drafted = rows.astype(np.int32) - np.int32(1)
        if drafters is None:
            drafters = plan.drafters
        assert drafters is not None
        sequences = drafted.nonzero()[0]
        right = taken_counts(plan, taken)[sequences] - np.int32(1)
        return cls(sequences, drafters[sequences], drafted[sequences], right)

    def fields(self, rows: Int32Array | None) -> dict[str, bytes]:
        """The fields of StepResult; `rows` as in `PlannedStep`."""
        places = self.sequences
        if rows is not None:
            of = np.full(int(rows.max(initial=-1)) + 1, -1, np.intp)  # the row of each sequence
            of[rows[rows >= 0]] = (rows >= 0).nonzero()[0]
            places = of[places]
        return {
            "draft_rows": pack(places.astype(np.int32)),
            "draft_counts": pack(self.drafted),
            "drafters": pack(self.drafters),
        }


def first_rows(plan: DevicePlan) -> NDArray[np.intp]:
    """The first sampling row of each sequence of a plan, `[sequences]`."""
    first = np.ones(len(plan.sample_slots), np.bool_)
    if plan.drafts is not None:
        first[: len(plan.drafts)] = plan.drafts == NO_DRAFT
    return first.nonzero()[0]


def places_of(counts: Int32Array) -> Int32Array:
    """For each of `counts` repeated rows its place among the repetitions, from 0."""
    begins = np.cumsum(counts, dtype=np.int32) - counts
    return np.arange(counts.sum(), dtype=np.int32) - np.repeat(begins, counts)
