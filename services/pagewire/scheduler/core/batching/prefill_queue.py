"""Prefill: which prompt tokens each step computes, and how many beside decodes."""

from collections.abc import Sized

from pagewire.scheduler.core.batching.long_prompts import LongPrompts
from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing
from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.window import SlidingWindow
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.sequence import Sequence

# The most steps for a prompt's piggybacked prefill: an eighth of a second where a step takes 8 ms.
# Longer prompts get a normal prefill of the excess.
MAX_PIGGYBACKED_STEPS = 16
# Known and predicted tokens of the sequences that start in a step, unless a single one has more. A
# step is one message: too many starts would exceed its size limit, and block the event loop.
MAX_START_TOKENS = 1 << 20


class PrefillQueue:
    """The admitted sequences with known tokens to compute, in the order of their admission."""

    __slots__ = ("_limits", "_sharing", "_table", "_unsent", "_window", "backlog", "long", "slots")

    def __init__(
        self,
        limits: WorkerLimits,
        table: SlotTable,
        sharing: PrefixSharing,
        window: SlidingWindow | None = None,
        waiting: Sized = (),
    ) -> None:
        """`window` None: a sequence has blocks for all of its known tokens. `waiting` are the
        sequences that wait for admission."""
        self.slots: list[int] = []
        # Their known tokens that are in no step yet.
        self.backlog = 0
        self.long = LongPrompts(limits, waiting)
        self._limits = limits
        self._table = table
        self._sharing = sharing
        self._window = window
        # Sequences that the worker does not have yet.
        self._unsent: list[Sequence] = []

    @property
    def near_backlog(self) -> int:
        """The backlog, with one chunk of each long prompt instead of all its tokens.

        Other prompts are admitted and computed as if a long prompt were no longer than that.
        """
        far = (self._left(slot) - self.long.chunk_tokens for slot in self.long.slots)
        return self.backlog - sum(max(0, tokens) for tokens in far)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that has just taken its slot."""
        self.slots.append(sequence.slot)
        tokens = sequence.num_known - sequence.num_computed
        self.backlog += tokens
        self.long.add(sequence.slot, tokens)
        self._unsent.append(sequence)

    def discard(self, slot: int) -> None:
        """Removes a slot whose sequence leaves, if it is in the queue."""
        if slot in self.slots:
            self.slots.remove(slot)
            self.long.discard(slot)
            self.backlog -= self._left(slot)
        self._unsent = [s for s in self._unsent if s.slot != slot]

    def put_into(self, plan: StepPlan, chunk_tokens: int, only: int | None) -> None:
        """Adds prefill chunks to a plan that has its decodes already.

        `chunk_tokens` bounds the chunks beside decodes. `only` is the one slot to add; None for
        all.
        """
        decodes = len(plan.decode_slots)
        turns = decodes > 0 and self.long.take_turns(decodes)
        backlog = self.near_backlog if turns else self.backlog
        budget = long_budget = self._budget(decodes, backlog, chunk_tokens)
        if turns:
            long_budget = self.long.chunk_tokens if self.long.may_go_on else 0
            most = self._limits.max_num_batched_tokens - decodes
            budget = min(budget + long_budget, most, chunk_tokens)
        elif 0 < len(self.long.slots) < len(self.slots):
            long_budget = self.long.chunk_tokens  # others are computed beside them
        to_send = {sequence.slot: sequence.num_sent for sequence in self._unsent}
        sent = 0
        for slot in self.slots:
            more = to_send.get(slot, 0)
            if budget <= 0 or (sent and more and sent + more > MAX_START_TOKENS):
                break
            if only is not None and slot != only:
                continue
            is_long = slot in self.long.slots
            most = min(budget, long_budget) if is_long else budget
            if most > 0 and (count := self._put_chunk(plan, slot, most)):
                budget -= count
                sent += more
                if is_long:
                    long_budget -= count
                    if turns:
                        self.long.sent(plan)
        if self._unsent:
            self._put_starts(plan)
        for slot in plan.completed:
            self.slots.remove(slot)
            self.long.discard(slot)

    def _left(self, slot: int) -> int:
        """Known tokens of a slot that are in no step yet."""
        return self._table.sequence(slot).num_known - int(self._table.computed[slot])

    def _put_chunk(self, plan: StepPlan, slot: int, budget: int) -> int:
        """Adds a chunk of at most `budget` tokens; returns how many it has.

        With a window, it has none while no block is free for it.
        """
        sequence, computed = self._table.sequence(slot), int(self._table.computed[slot])
        count = min(budget, sequence.num_known - computed)
        if self._window is not None:
            count = self._window.extend(plan, slot, count)
            if not count:
                return 0
        computed += count
        self.backlog -= count
        plan.prefill_slots.append(slot)
        plan.prefill_counts.append(count)
        self._table.computed[slot] = computed
        self._table.last_step[slot] = plan.number
        self._sharing.cache(sequence, computed, proven=False)
        if computed == sequence.num_known:
            plan.completed.append(slot)
            self._sharing.offer_copies(sequence, computed - 1, proven=False)
        return count

    def _put_starts(self, plan: StepPlan) -> None:
        """Adds the starts of the sequences in the plan that the worker does not have yet."""
        named = set(plan.prefill_slots)
        plan.starts = [s for s in self._unsent if s.slot in named]
        for sequence in plan.starts:
            self._sharing.drop_copy(sequence.slot)
        self._unsent = [s for s in self._unsent if s.slot not in named]

    def _budget(self, num_decodes: int, backlog: int, chunk_tokens: int) -> int:
        """Prompt tokens of a backlog that a step may compute beside `num_decodes` decodes.

        Beside few decodes, prefill is piggybacked: steps stay within `piggyback_tokens`. A backlog
        that would take more than MAX_PIGGYBACKED_STEPS of them gets a larger step first. While the
        backlog exceeds a whole step, steps are full: prompts are late then, not decodes.
        """
        most = self._limits.max_num_batched_tokens
        budget = most - num_decodes
        if not num_decodes:
            return budget
        piggyback = self._limits.piggyback_tokens
        free = piggyback - num_decodes
        if 2 * free >= piggyback > 0 and backlog < most:
            budget = min(budget, max(free, backlog - MAX_PIGGYBACKED_STEPS * free))
        return min(budget, chunk_tokens)

    def check(self) -> None:
        """Asserts the invariants over its slots."""
        assert self.backlog == sum(self._left(slot) for slot in self.slots), "a wrong backlog"
        assert set(self.long.slots) <= set(self.slots), "a long prompt is not in the queue"
