"""The drafts of all slots of one stream: made when a step is planned, judged by its tokens.

It needs the tokens of a step before the next one is planned, so it works with synchronous backends.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.draft_length import DraftLength
from pagewire.worker.protocol.speculation.suffix_drafter import SuffixDrafter
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import first_rows, taken_counts, with_drafts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start

_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class _Drafted:
    """The sequence of a slot."""

    drafter: SuffixDrafter
    length: DraftLength


class Drafts:
    """Drafts for the sequences of one stream."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sequences: list[_Drafted | None] = [None] * limits.num_slots
        self._ends = np.zeros(limits.num_slots, np.int32)  # the most tokens of each output

    def start(self, start: Start) -> None:
        """A sequence takes a slot."""
        more = start.max_new_tokens or INT32_MAX - start.num_generated
        self._ends[start.slot] = min(start.num_generated + more, INT32_MAX)
        length = DraftLength(self._limits.max_drafts)
        self._sequences[start.slot] = _Drafted(SuffixDrafter(start.token_ids), length)

    def ended(self, slots: Int32Array, generated: Int32Array) -> NDArray[np.bool_]:
        """Which of `slots [n]` have had all their tokens; `generated [n]` is how many they had."""
        ended: NDArray[np.bool_] = generated >= self._ends[slots]
        return ended

    def draft(self, plan: DevicePlan, room: Int32Array) -> DevicePlan:
        """The plan with drafts; `room [slots]` is how many tokens fit into the blocks of each."""
        decodes = plan.num_decodes
        left = self._limits.max_num_batched_tokens - decodes - plan.num_prefilled
        slots = plan.decode_slots
        # A row draws one token more than it has drafts.
        most = np.minimum(
            room[slots] - plan.decode_positions, self._ends[slots] - plan.sample_indices[:decodes]
        )
        drafts = []
        for slot, fitting in zip(slots.tolist(), (most - 1).tolist(), strict=True):
            sequence, tokens = self._sequences[slot], _NONE
            if sequence is not None and (length := sequence.length.next(decodes)):
                tokens = sequence.drafter.draft(min(length, fitting, left))
            left -= len(tokens)
            drafts.append(tokens)
        return with_drafts(plan, drafts) if any(map(len, drafts)) else plan

    def take(
        self, plan: DevicePlan, tokens: Int32Array, taken: NDArray[np.bool_] | None
    ) -> Int32Array:
        """Takes the tokens of a step; how many each sequence has got, in the order of the plan.

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
            if sequence is None or tokens[first] < 0:
                continue
            sequence.drafter.extend(tokens[first : first + count])
            if proposed:
                sequence.length.observe(proposed, count - 1)
        return counts
