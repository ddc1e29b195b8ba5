"""The drafts of all slots of one stream: made when a step is planned, checked by its tokens.

The tokens of a step must be known before the next one is planned: for synchronous backends only.
"""

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.recent_outputs import RecentBySalt
from pagewire.worker.protocol.speculation.sequence_drafts import NO_DRAFTS, SequenceDrafts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import first_rows, taken_counts, with_drafts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start


class Drafts:
    """Drafts for the sequences of one stream."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sequences: list[SequenceDrafts | None] = [None] * limits.num_slots
        self._ends = np.zeros(limits.num_slots, np.int32)  # the most tokens of each output
        self._recent = RecentBySalt()
        self._decoded = NO_DRAFTS  # the slots that decoded in the latest step

    def start(self, start: Start) -> None:
        """Makes the drafters of a sequence that takes a slot."""
        more = start.max_new_tokens or INT32_MAX - start.num_generated
        self._ends[start.slot] = min(start.num_generated + more, INT32_MAX)
        self._publish(start.slot)
        self._sequences[start.slot] = SequenceDrafts(
            start.token_ids,
            start.num_prompt,
            start.prediction,
            self._recent.of(start.cache_salt),
            self._limits.max_drafts,
            self._limits.draft_cost,
        )

    def ended(self, slots: Int32Array, generated: Int32Array) -> NDArray[np.bool_]:
        """Which of `slots [n]` have all their tokens; `generated [n]` is the number of each."""
        ended: NDArray[np.bool_] = generated >= self._ends[slots]
        return ended

    def draft(self, plan: DevicePlan, room: Int32Array) -> DevicePlan:
        """The plan with drafts; `room [slots]` is the number of tokens that fit into the blocks."""
        decodes = plan.num_decodes
        left = self._limits.max_num_batched_tokens - decodes - plan.num_prefilled
        slots = plan.decode_slots
        if slots is not self._decoded:
            for slot in np.setdiff1d(self._decoded, slots).tolist():
                self._publish(slot)  # its sequence has ended, or waits
            self._decoded = slots
        # A row draws one token more than it has drafts.
        most = np.minimum(
            room[slots] - plan.decode_positions, self._ends[slots] - plan.sample_indices[:decodes]
        )
        forced = {} if plan.masks is None else plan.masks.forced()
        drafts, drafters = [], []
        for slot, fitting in zip(slots.tolist(), (most - 1).tolist(), strict=True):
            sequence, tokens = self._sequences[slot], NO_DRAFTS
            if sequence is not None:
                tokens = sequence.draft(decodes, min(fitting, left), forced.get(slot, ()))
            left -= len(tokens)
            drafts.append(tokens)
            drafters.append(0 if sequence is None else sequence.drafter)
        return with_drafts(plan, drafts, drafters) if any(map(len, drafts)) else plan

    def take(
        self, plan: DevicePlan, tokens: Int32Array, taken: NDArray[np.bool_] | None
    ) -> Int32Array:
        """Takes the tokens of a step; returns the number for each sequence, in the plan's order.

        `tokens [rows]` and `taken [rows]` as in the step's outcome.
        """
        firsts = first_rows(plan)
        drafted = np.diff(firsts, append=len(plan.sample_slots)) - 1
        counts = np.ones(len(firsts), np.int32)
        if taken is not None:
            counts = taken_counts(plan, taken)
        rows = zip(
            plan.sample_slots[firsts].tolist(),
            firsts.tolist(),
            counts.tolist(),
            drafted.tolist(),
            strict=True,
        )
        for slot, first, count, proposed in rows:
            sequence = self._sequences[slot]
            if sequence is not None and tokens[first] >= 0:
                sequence.extend(tokens[first : first + count], proposed)
        return counts

    def _publish(self, slot: int) -> None:
        """Lets other sequences of the same salt draft from the output of a slot."""
        sequence = self._sequences[slot]
        if sequence is not None:
            sequence.publish()
