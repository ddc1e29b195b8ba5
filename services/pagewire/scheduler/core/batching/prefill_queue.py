"""Prefill: which prompt tokens each step computes, and how many beside decodes."""

from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing
from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.window import SlidingWindow
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.sequence import Sequence

# The most steps in which a prompt's piggybacked prefill may take place: an eighth of a second where
# a step takes 8 ms. Longer prompts get a normal prefill of what is too much for these steps.
MAX_PIGGYBACKED_STEPS = 16
# Known and predicted tokens of the sequences that start in a step, unless a single one has more. A
# step is one message, so many starts at once would exceed its size, and hold the event loop.
MAX_START_TOKENS = 1 << 20


class PrefillQueue:
    """The admitted sequences with known tokens to compute, in the order of their admission."""

    __slots__ = ("_limits", "_sharing", "_table", "_unsent", "_window", "backlog", "slots")

    def __init__(
        self,
        limits: WorkerLimits,
        table: SlotTable,
        sharing: PrefixSharing,
        window: SlidingWindow | None = None,
    ) -> None:
        """`window` None: a sequence has blocks for all of its known tokens."""
        self.slots: list[int] = []
        # Their known tokens that are in no step yet.
        self.backlog = 0
        self._limits = limits
        self._table = table
        self._sharing = sharing
        self._window = window
        # Sequences that the worker does not know yet.
        self._unsent: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that has just taken its slot."""
        self.slots.append(sequence.slot)
        self.backlog += sequence.num_known - sequence.num_computed
        self._unsent.append(sequence)

    def discard(self, slot: int) -> None:
        """Removes a slot whose sequence leaves, if it is in the queue."""
        if slot in self.slots:
            self.slots.remove(slot)
            self.backlog -= self._table.sequence(slot).num_known - int(self._table.computed[slot])
        self._unsent = [s for s in self._unsent if s.slot != slot]

    def put_into(self, plan: StepPlan, chunk_tokens: int, only: int | None) -> None:
        """Adds prefill chunks to a plan that has its decodes already.

        `chunk_tokens` bounds the chunks beside decodes. `only`: no slot but this one, unless None.
        """
        budget = self._budget(len(plan.decode_slots), chunk_tokens)
        to_send = {sequence.slot: sequence.num_sent for sequence in self._unsent}
        sent = 0
        for slot in self.slots:
            more = to_send.get(slot, 0)
            if budget <= 0 or (sent and more and sent + more > MAX_START_TOKENS):
                break
            if (only is None or slot == only) and (count := self._put_chunk(plan, slot, budget)):
                budget -= count
                sent += more
        if self._unsent:
            self._put_starts(plan)
        for slot in plan.completed:
            self.slots.remove(slot)

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
        """Adds what the worker must know of the slots in the plan that it does not know yet."""
        named = set(plan.prefill_slots)
        plan.starts = [s for s in self._unsent if s.slot in named]
        for sequence in plan.starts:
            self._sharing.drop_copy(sequence.slot)
        self._unsent = [s for s in self._unsent if s.slot not in named]

    def _budget(self, num_decodes: int, chunk_tokens: int) -> int:
        """Prompt tokens that a step may compute beside so many decodes.

        Beside few decodes, prefill is piggybacked: steps stay within `piggyback_tokens`. A backlog
        that would take more than MAX_PIGGYBACKED_STEPS of them gets a larger step first. While the
        backlog exceeds a whole step, steps are full: prompts, not decodes, are what is late.
        """
        most = self._limits.max_num_batched_tokens
        budget = most - num_decodes
        if not num_decodes:
            return budget
        piggyback = self._limits.piggyback_tokens
        free = piggyback - num_decodes
        if 2 * free >= piggyback > 0 and self.backlog < most:
            budget = min(budget, max(free, self.backlog - MAX_PIGGYBACKED_STEPS * free))
        return min(budget, chunk_tokens)
