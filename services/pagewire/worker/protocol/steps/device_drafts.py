"""The drafts of all slots of one stream, for a backend that makes drafts while steps run ahead.

This module decides how many rows each sequence has in a step. The tokens of its drafts, and the
number of right ones, are known only with the step's result. Until then the position of a sequence
has two bounds: each step in flight adds at least one token, and at most one for each of its rows.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.row_choice import FEW_SEQUENCES, RowChoice, RowCosts
from pagewire.worker.protocol.speculation.slot_outputs import SlotOutputs
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import first_rows, taken_counts, with_device_drafts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start

# As in draft_length.py: each result reduces the weight of earlier ones by `MEMORY`, and the rate
# before the first results counts as much as the results of `TRIED_BEFORE` drafts.
MEMORY = 0.8
TRIED_BEFORE = 2.0
# That rate, without and with a prediction of the client.
RIGHT_BEFORE, PREDICTED_BEFORE = 0.5, 0.9
# With more than `FEW_SEQUENCES`, a choice of drafts holds for this many further steps.
STEPS_UNCHANGED = 8
# A draft model drafts nothing in steps without drafts. After this many such steps, one step has a
# draft for each sequence.
UNTRIED_STEPS = 32


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a step: for its decode rows, and all tokens of outputs."""

    slots: Int32Array  # [sequences]
    more: Int32Array  # [sequences], tokens after the first
    drafted: Int32Array  # [sequences], rows of drafts
    # [sequences], whether the first draft was right; each has a draft even if no row checked it.
    right: NDArray[np.bool_]
    judged: bool  # whether each sequence had a draft
    token_slots: Int32Array  # [tokens]
    tokens: Int32Array  # [tokens]


class DeviceDrafts:
    """Rows for drafts of the sequences of one stream."""

    def __init__(self, limits: Limits, costs: RowCosts) -> None:
        n = limits.num_slots
        self._limits = limits
        self._choice = RowChoice(costs, limits.max_drafts)
        self._model = costs.passes is not None
        self._untried = 0  # steps since the last one with drafts
        self._ends = np.zeros(n, np.int32)  # the most tokens of each output
        self._longest = np.zeros(n, np.int32)  # the most tokens whose KV is computed
        # Drafts of steps in flight, any of which may turn out to be right.
        self._ahead = np.zeros(n, np.int32)
        # Whether a draft's row may be sampled together with the row before it. It may not if its
        # penalties or its grammar's mask depend on that row's token.
        self._independent = np.zeros(n, np.bool_)
        self._tried = np.zeros(n, np.float64)
        self._right = np.zeros(n, np.float64)
        self._results: deque[_Result] = deque()  # `take` adds them on another thread
        self._outputs = SlotOutputs(n)
        # The last choice: its slots, the drafts of each, and the further steps for which it holds.
        self._chosen = (np.empty(0, np.int32), np.empty(0, np.int32), 0)

    def with_recent(self, starts: tuple[Start, ...], running: Int32Array) -> tuple[Start, ...]:
        """The starts with recent outputs of their salts, without those of slots `running [n]`."""
        if not starts:
            return starts
        self._outputs.publish(running)
        return tuple(
            replace(start, recent=self._outputs.recent(start.cache_salt)) for start in starts
        )

    def start(self, start: Start) -> None:
        """Initializes the drafts of a sequence that takes a slot."""
        slot, known = start.slot, len(start.token_ids)
        more = start.max_new_tokens or INT32_MAX - max(start.num_generated, known)
        self._outputs.start(slot, start.cache_salt, start.token_ids)
        self._ends[slot] = min(start.num_generated + more, INT32_MAX)
        self._longest[slot] = min(known - 1 + more, self._limits.max_model_len)
        self._ahead[slot] = 0
        self._independent[slot] = start.constraint is None and not start.sampling.penalized
        self._tried[slot] = TRIED_BEFORE
        right = PREDICTED_BEFORE if len(start.prediction) else RIGHT_BEFORE
        self._right[slot] = TRIED_BEFORE * right

    def ended(self, slots: Int32Array, generated: Int32Array) -> NDArray[np.bool_]:
        """Which of `slots [n]` certainly have all their tokens.

        `generated [n]` is the least number of each. Only the device knows whether others end.
        """
        ended: NDArray[np.bool_] = generated >= self._ends[slots]
        return ended

    def reached(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """The last possible positions `[n]` of first rows at `positions [n]` or later."""
        reached: Int32Array = np.minimum(positions + self._ahead[slots], self._longest[slots] - 1)
        return reached

    def draft(self, plan: DevicePlan, room: Int32Array) -> DevicePlan:
        """The plan with drafts; `room [slots]` is the number of tokens that fit into the blocks."""
        slots, decodes = plan.decode_slots, plan.num_decodes
        if not decodes or plan.chunks is not None:
            return plan
        positions = plan.decode_positions
        left = np.minimum(
            self._ends[slots] - plan.sample_indices,
            np.minimum(self._longest[slots], room[slots]) - positions - self._ahead[slots],
        )
        most = np.minimum(left - 1, self._limits.max_drafts)
        most = np.where(self._independent[slots], np.maximum(most, 0), 0)
        lengths = np.minimum(self._lengths(slots, most, positions), most)
        self._untried = 0 if lengths.any() else self._untried + 1
        if self._model and self._untried >= UNTRIED_STEPS:
            lengths, self._untried = self._trial(most), 0
        self._ahead[slots] += lengths
        return with_device_drafts(plan, lengths) if lengths.any() else plan

    def _trial(self, most: Int32Array) -> Int32Array:
        """A draft for each sequence, while rows are left."""
        lengths = np.minimum(most, 1)
        left = int(self._choice.most_rows) - len(most)
        lengths[np.cumsum(lengths) > left] = 0
        return lengths

    def _lengths(self, slots: Int32Array, most: Int32Array, positions: Int32Array) -> Int32Array:
        """The number of drafts of each of `slots [n]`, chosen again after some steps."""
        before, lengths, steps = self._chosen
        if steps and len(before) == len(slots) and (before == slots).all():
            self._chosen = before, lengths, steps - 1
            return lengths
        rates = self._right[slots] / self._tried[slots]
        lengths = self._choice.lengths(rates, most, float(positions.mean()))
        few = len(slots) <= FEW_SEQUENCES and not self._model
        self._chosen = slots, lengths, 0 if few else STEPS_UNCHANGED
        return lengths

    def take(
        self,
        plan: DevicePlan,
        tokens: Int32Array,
        taken: NDArray[np.bool_] | None,
        right: NDArray[np.bool_],
    ) -> None:
        """Queues the result of a step, on any thread; the arguments are as in the outcome."""
        firsts = first_rows(plan)
        drafted = np.diff(firsts, append=len(plan.sample_slots)).astype(np.int32) - 1
        more = np.zeros(len(firsts), np.int32) if taken is None else taken_counts(plan, taken) - 1
        # There are no drafts before the first token.
        decoded = np.flatnonzero(firsts < plan.num_decodes)
        slots = plan.sample_slots[firsts[decoded]]
        judged = not self._model or bool(drafted.any())
        kept = tokens >= 0 if taken is None else taken & (tokens >= 0)
        self._results.append(
            _Result(
                slots=slots,
                more=more[decoded],
                drafted=drafted[decoded],
                right=right[decoded],
                judged=judged,
                token_slots=plan.sample_slots[kept],
                tokens=tokens[kept],
            )
        )

    def settle(self) -> list[tuple[Int32Array, Int32Array]]:
        """Applies the queued results, on the thread that plans.

        Returns the slots of each result, and the number of tokens after the first of each.
        """
        settled = []
        while self._results:
            result = self._results.popleft()
            slots, more, drafted = result.slots, result.more, result.drafted
            self._ahead[slots] -= drafted
            # Drafts after the first wrong one were not checked.
            computed = drafted > 0
            tried = np.where(computed, np.minimum(more + 1, drafted), 1)
            right = np.where(computed, more, result.right)
            if result.judged:
                self._tried[slots] = MEMORY * self._tried[slots] + tried
                self._right[slots] = MEMORY * self._right[slots] + right
            self._outputs.add(result.token_slots, result.tokens)
            settled.append((slots, more))
        return settled
