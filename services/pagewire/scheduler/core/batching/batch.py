"""Continuous batching on one worker: what each step computes, and what its answer means.

A step is planned before the answers to the steps ahead of it are known, so everything here
counts tokens and never looks at their values; values matter only in `commit`, for stop ids.
"""

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.batching.decode_list import DecodeList
from pagewire.scheduler.core.batching.isolation import Isolation
from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing, Return
from pagewire.scheduler.core.batching.slot_table import SlotArray, SlotTable
from pagewire.scheduler.core.batching.step_plan import StepOutcome, StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import SCRATCH_BLOCK, BlockPool
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence, State

# The most steps that the queued prompts may take as piggybacked prefill. More than that is
# prefilled at once. It is an eighth of a second where a step takes 8 ms.
MAX_PIGGYBACK_STEPS = 16


class WorkerBatch:
    """The sequences, slots and blocks of one worker.

    SlotArray and blocks of a sequence that leaves are reused only after every step that names them
    has been answered.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        policy: SchedulingPolicy,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        """`on_preempt` is called with each sequence that gave its place up, to queue it again."""
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size, limits.host)
        self.slots = SlotTable(limits.num_slots)
        self.in_flight: deque[StepPlan] = deque()
        self.preemptions = 0
        # When it came, in seconds of the caller's clock.
        self.joined = 0.0
        # The most prompt tokens of a step that has decodes too.
        self.chunk_tokens = limits.max_num_batched_tokens
        self._policy = policy
        self._on_preempt = on_preempt
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._prefilling: list[int] = []
        self._backlog = 0
        self._to_start: list[Sequence] = []
        self._retiring: list[tuple[int, int, list[int]]] = []
        self._stalled: set[int] = set()
        self._next_step = 1
        self._answered = 0
        self._sharing = PrefixSharing(limits, self.pool)
        self._decode = DecodeList(self.slots, limits.prefix_groups)
        self._isolation = Isolation(self.slots, self._decode)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return int(self.slots.live.sum())

    @property
    def backlog(self) -> int:
        """Known tokens of admitted sequences that are in no step yet."""
        return self._backlog

    @property
    def tried(self) -> Sequence | None:
        """The suspect whose steps run alone."""
        slot = self._isolation.alone
        return None if slot is None else self.slots.sequences[slot]

    @property
    def idle(self) -> bool:
        """Whether nothing runs and no slot or block is still held."""
        return len(self._free_slots) == self.limits.num_slots

    @property
    def unused_places(self) -> int:
        """Places for a token, in blocks of running sequences, that none is known for yet."""
        table = self.slots
        taken = np.maximum(table.computed, table.known)
        return int((table.capacity - taken)[table.live].sum())

    def fits(self, sequence: Sequence) -> bool:
        """Whether the worker, with its whole pool, takes the sequence at its longest."""
        longest = sequence.max_computed
        return (
            longest < self.limits.max_model_len
            and self.limits.blocks_for(longest) <= self.pool.total
        )

    @property
    def open(self) -> bool:
        """Whether a sequence that needs little enough memory could start now."""
        return bool(self._free_slots) and self._backlog < self.limits.max_num_batched_tokens

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of its first tokens are in the cache."""
        return self._sharing.find(sequence).num_tokens(self.limits.block_size)

    def prefill_cost(self, sequence: Sequence) -> float:
        """How many of its tokens would be computed, with what is loaded from the host counted as
        the tokens that take as long."""
        cached = self._sharing.find(sequence)
        host, loaded = self.limits.host, 0.0
        if cached.host_blocks:
            loaded = len(cached.host_blocks) * host.load_block / host.prefill_token
        return sequence.num_known - cached.num_tokens(self.limits.block_size) + loaded

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether the sequence may start now.

        It needs a slot and blocks for its known tokens (for all it may get, where `limits` want
        whole sequences). Beside running sequences it must leave
        the part of the pool above the threshold free for them to grow into. It waits while the
        prefill of another one is about to compute more of its beginning than is cached.
        """
        if not self.open or not self.fits(sequence):
            return False
        cached = self._sharing.find(sequence)
        if self._sharing.is_being_computed(sequence, cached.num_full, self._prefilling, self.slots):
            return False
        if self.limits.whole_sequences and not self._fits_whole(sequence):
            return False
        need = self.limits.blocks_for(sequence.num_known) - len(cached.blocks)
        woken = self.pool.num_idle(cached.blocks)
        if need > self.pool.available - woken:
            if not self._sharing.keeps:
                return False
            self._sharing.forget_all()
            return self.can_admit(sequence)
        ceiling = self.limits.memory_threshold * self.pool.total
        return self.pool.used + need + woken <= ceiling or self.num_running == 0

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether there is room for everybody at their longest."""
        everybody = [*self.running(), sequence]
        longest = sum(self.limits.blocks_for(other.max_computed) for other in everybody)
        leaving = sum(len(blocks) for _, _, blocks in self._retiring)
        return longest + leaving <= self.pool.total

    def admit(self, sequence: Sequence) -> Return | None:
        """Gives the sequence a slot and blocks for its known tokens; `can_admit` must hold.

        Returns how it comes back if it was preempted.

        Blocks that are cached for its first tokens are shared or loaded from the host, one that is
        not full is copied, and those tokens are not computed.
        """
        slot = self._free_slots.pop()
        cached = self._sharing.find(sequence)
        self.pool.acquire(cached.blocks)
        more = self.limits.blocks_for(sequence.num_known) - cached.num_full
        sequence.blocks = cached.blocks + self.pool.bring(cached.blocks, cached.host_blocks, more)
        sequence.slot = slot
        sequence.state = State.PREFILL
        copied = cached.partial.block if cached.partial else SCRATCH_BLOCK
        returned = None
        if sequence.preempted:
            sequence.preempted = False
            returned = cached.way_back(sequence, self.limits.block_size)
        loaded = len(cached.host_blocks) * self.limits.block_size
        sequence.start(cached.num_tokens(self.limits.block_size), copied, loaded)
        if copied:
            self._sharing.copy(sequence, copied)
        capacity = len(sequence.blocks) * self.limits.block_size
        self.slots.occupy(slot, sequence, capacity)
        self._prefilling.append(slot)
        self._backlog += sequence.num_known - sequence.num_computed
        self._to_start.append(sequence)
        self._policy.admitted(sequence)
        if sequence.suspect:
            self._isolation.add(sequence)
        return returned

    def plan(self) -> StepPlan | None:
        """The next step, to be sent at once; None when there is nothing to compute.

        A suspect's steps run alone, one at a time: then nobody else is there when the worker falls.
        """
        if self._isolation and not self._isolation.isolate(
            bool(self.in_flight), self._prefilling, self._stalled
        ):
            return None
        plan = StepPlan(self._next_step)
        self._plan_decode(plan)
        self._plan_prefill(plan)
        if plan.num_tokens == 0:
            if self._isolation.first_is_done:
                return self.plan()  # it gave its place up for want of a block: others go on
            return None
        self._next_step += 1
        self._decode.sent()
        plan.copies = self.pool.take_copies()
        self.in_flight.append(plan)
        return plan

    def commit(self, number: int, tokens: Int32Array) -> StepOutcome:
        """Takes the answer to the oldest step in flight; `tokens` is parallel to its rows.

        Raises ValueError if the answer is not to that step or has another number of rows.
        """
        if not self.in_flight or self.in_flight[0].number != number:
            raise ValueError(f"answer to step {number}, which is not the oldest in flight")
        plan = self.in_flight[0]
        rows = plan.rows
        if len(tokens) != len(rows):
            raise ValueError(f"step {number} has {len(rows)} rows, its answer {len(tokens)}")
        self.in_flight.popleft()
        self._answered = number
        table = self.slots
        valid = table.live[rows] & (tokens >= 0)
        complete = np.count_nonzero(valid) == len(rows)
        if not complete:
            rows, tokens = rows[valid], tokens[valid]
        indices = table.append(rows, tokens)
        stopped = table.stopped(rows, tokens)
        ended = table.full(rows) if plan.ends else []
        for slot in plan.completed:
            if table.live[slot]:
                sequence = table.sequence(slot)
                if table.received[slot] > sequence.num_generated:  # else its row failed
                    self._sharing.prove(sequence)
        self._release_answered()
        return StepOutcome(rows, tokens, indices, stopped, ended, None if complete else valid)

    def finish(
        self, slot: int, state: State, sound: bool = True, *, keep: bool = False
    ) -> Sequence:
        """Ends the sequence in a live slot with a final state, or PENDING to run it again.

        Its full blocks stay cached unless it is not `sound`: see `distrust`.
        With `keep` its last block, too, is there to begin with, until `forget` or until others need
        the memory.
        """
        sequence = self.slots.sequence(slot)
        assert self.slots.live[slot], f"slot {slot} is not live"
        self._withdraw(slot)
        self.slots.vacate(slot)
        sequence.state = state
        sequence.slot = -1
        self._sharing.withdraw(sequence)
        if sound:
            self._sharing.cache(sequence, sequence.num_answered, proven=True)
        if keep:
            self._sharing.keep(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self._retiring.append((int(self.slots.last_step[slot]), slot, blocks))
        if not sound:
            self._drop_unproven(blocks)
        self._policy.left(sequence)
        self._release_answered()
        return sequence

    def distrust(self, slot: int) -> None:
        """The oldest step in flight has failed for a slot; to be called before its `commit`.

        If the sequence has left already, the blocks that it was computing, and from which nobody
        has sampled a token, are not found any more, and whoever shares them gives its place up.
        For one that still runs, `finish` does the same. ValueError if there is no such slot.
        """
        if not 0 <= slot < self.limits.num_slots:
            raise ValueError(f"slot {slot} has failed, and there are {self.limits.num_slots}")
        for _, left, blocks in list(self._retiring):
            if left == slot:
                self._drop_unproven(blocks)

    def forget(self, arrival: int) -> None:
        """Lets go of what was kept of an ended sequence, if there is anything."""
        self._sharing.forget(arrival)

    def named_slots(self) -> set[int]:
        """SlotArray that steps in flight compute, those of sequences that have ended included."""
        named = {slot for plan in self.in_flight for slot in plan.prefill_slots}
        return named.union(*(plan.rows.tolist() for plan in self.in_flight))

    def running(self) -> list[Sequence]:
        """The sequences in live slots, by slot."""
        return [self.slots.sequence(int(slot)) for slot in np.flatnonzero(self.slots.live)]

    def evacuate(self) -> list[Sequence]:
        """Takes every sequence off a worker that is lost; the batch must not be used again."""
        return [self.finish(sequence.slot, State.PENDING) for sequence in self.running()]

    def check(self) -> None:
        """Asserts the invariants over pool, slots and sequences."""
        self.pool.check()
        held = Counter(block for s in self.running() for block in s.blocks)
        self._sharing.check(self.running())
        held.update(block for _, _, blocks in self._retiring for block in blocks)
        held.update(self._sharing.held())
        held.update(block for blocks in self.pool.loading for block in blocks)
        assert len(held) == self.pool.used, "a held block has no owner"
        assert all(self.pool.references(b) == count for b, count in held.items()), "a miscount"
        busy = self.num_running + len(self._retiring)
        assert busy + len(self._free_slots) == self.limits.num_slots, "a slot was lost"
        table = self.slots
        for slot in np.flatnonzero(table.live):
            sequence = self.slots.sequence(int(slot))
            assert table.received[slot] <= table.sampled[slot] <= table.limit[slot]
            assert table.computed[slot] <= table.capacity[slot]
            assert table.capacity[slot] == len(sequence.blocks) * self.limits.block_size
        assert all(p.num_tokens <= self.limits.max_num_batched_tokens for p in self.in_flight)

    def _drop_unproven(self, blocks: list[int]) -> None:
        self._sharing.drop_unproven(blocks, self.running, self._preempt)

    def _plan_decode(self, plan: StepPlan) -> None:
        table = self.slots
        self._decode.refresh()
        # All slots at once: whole arrays cost less than gathering the rows of the decode list.
        full = ((table.computed >= table.capacity) & table.decoding).nonzero()[0]
        if not self._stalled and len(full) <= self.pool.available:
            self._append_blocks(full, plan)
        else:
            self._grow_all({*full.tolist(), *self._stalled}, plan)
            self._decode.refresh()
        self._decode.put_into(plan)
        self._decode.advance(plan)

    def _append_blocks(self, slots: SlotArray, plan: StepPlan) -> None:
        """Gives each slot one more block; the pool has enough."""
        if not len(slots):
            return
        named, blocks = slots.tolist(), self.pool.allocate(len(slots))
        for slot, block in zip(named, blocks, strict=True):
            self.slots.sequence(slot).blocks.append(block)
        self.slots.capacity[slots] += self.limits.block_size
        plan.append_slots += named
        plan.append_blocks += blocks

    def _grow_all(self, slots: set[int], plan: StepPlan) -> None:
        """Gives each slot one more block, in the order of the policy, while memory is short.

        In that order a victim always comes after the slot it gives way to, so a block that this
        plan has already appended is never taken away again.
        """
        awaited = self._awaited_blocks()
        for slot in sorted(slots, key=lambda s: self._policy.key(self.slots.sequence(s))):
            if self.slots.live[slot]:
                awaited = self._grow(slot, plan, awaited)

    def _grow(self, slot: int, plan: StepPlan, awaited: int) -> int:
        """Gives a slot one more block, or takes it out of this step.

        When no block is free, and no more are `awaited` than slots stall, a victim gives way. Its
        blocks may still be named by steps in flight; until those are answered the slot stalls.
        Returns how many blocks are awaited now.
        """
        table = self.slots
        self._stalled.discard(slot)
        if self.pool.available == 0:
            self._sharing.forget_all()
        while self.pool.available == 0 and awaited <= len(self._stalled):
            self._preempt(self._policy.victim(self._evictable()))
            awaited = self._awaited_blocks()
            if not table.live[slot]:
                return awaited
        if self.pool.available == 0:
            self._stalled.add(slot)
            self._decode.set(slot, False)
            return awaited
        block = self.pool.allocate(1)[0]
        self.slots.sequence(slot).blocks.append(block)
        table.capacity[slot] += self.limits.block_size
        self._decode.set(slot, True)
        plan.append_slots.append(slot)
        plan.append_blocks.append(block)
        return awaited

    def _ending(self) -> NDArray[np.bool_]:
        """SlotArray whose last token is in flight: their blocks come back without a preemption."""
        return self.slots.live & (self.slots.sampled >= self.slots.limit)

    def _awaited_blocks(self) -> int:
        """Blocks that come back once the steps in flight are answered."""
        retiring = sum(len(blocks) for _, _, blocks in self._retiring)
        ending = sum(
            len(self.slots.sequence(int(s)).blocks) for s in np.flatnonzero(self._ending())
        )
        return retiring + ending

    def _evictable(self) -> list[Sequence]:
        slots = np.flatnonzero(self.slots.live & ~self._ending())
        return [self.slots.sequence(int(slot)) for slot in slots]

    def _preempt(self, victim: Sequence, sound: bool = True) -> None:
        """Queues a sequence again; one that runs here no more does that already."""
        if not self.slots.holds(victim):
            return
        victim.preemptions += 1
        victim.preempted = True
        self.preemptions += 1
        blocks = victim.blocks
        self.finish(victim.slot, State.PENDING, sound)
        self.pool.expect(blocks)
        self._on_preempt(victim)

    def _plan_prefill(self, plan: StepPlan) -> None:
        table = self.slots
        budget = self._prefill_budget(len(plan.decode_slots))
        completed = []
        for slot in self._prefilling:
            if budget <= 0:
                break
            if self._isolation.alone not in (None, slot):
                continue
            known = self.slots.sequence(slot).num_known
            count = min(budget, known - int(table.computed[slot]))
            budget -= count
            self._backlog -= count
            plan.prefill_slots.append(slot)
            plan.prefill_counts.append(count)
            table.computed[slot] += count
            table.last_step[slot] = plan.number
            self._sharing.cache(self.slots.sequence(slot), int(table.computed[slot]), proven=False)
            if table.computed[slot] == known:
                completed.append(slot)
                self._sharing.offer_copies(self.slots.sequence(slot), known - 1, proven=False)
        plan.completed = completed
        if self._to_start:
            named = set(plan.prefill_slots)
            plan.starts = [s for s in self._to_start if s.slot in named]
            for sequence in plan.starts:
                self._sharing.drop_copy(sequence.slot)
            self._to_start = [s for s in self._to_start if s.slot not in named]
        if completed:
            self._start_decoding(completed, plan)
            plan.rows = np.concatenate([plan.rows, np.array(completed, dtype=np.intp)])

    def _prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens that a step may compute beside so many decodes.

        Beside few decodes, prompts are prefilled in chunks that keep the step at
        `piggyback_tokens`. A backlog that needs more than `MAX_PIGGYBACK_STEPS` such
        steps is prefilled at once. So is everything while more is queued than a step holds: then
        prefill takes the most time.
        """
        most = self.limits.max_num_batched_tokens
        budget = most - num_decodes
        if not num_decodes:
            return budget
        most_tokens = self.limits.piggyback_tokens
        free = most_tokens - num_decodes
        if 2 * free >= most_tokens > 0 and self._backlog < most:
            budget = min(budget, max(free, self._backlog - MAX_PIGGYBACK_STEPS * free))
        return min(budget, self.chunk_tokens)

    def _start_decoding(self, slots: list[int], plan: StepPlan) -> None:
        """Prefill of these slots ends in the step being planned, which samples a token of each."""
        table = self.slots
        for slot in slots:
            self._prefilling.remove(slot)
            self.slots.sequence(slot).state = State.DECODE
            table.sampled[slot] += 1
            if table.sampled[slot] < table.limit[slot]:
                self._decode.set(slot, True)
            else:
                plan.ends = True

    def _withdraw(self, slot: int) -> None:
        """Takes a slot out of whatever future steps would compute of it."""
        if slot in self._prefilling:
            self._prefilling.remove(slot)
            self._backlog -= self.slots.sequence(slot).num_known - int(self.slots.computed[slot])
        self._to_start = [s for s in self._to_start if s.slot != slot]
        self._sharing.drop_copy(slot)
        self._stalled.discard(slot)
        self._decode.discard(slot)

    def _release_answered(self) -> None:
        waiting = []
        for entry in self._retiring:
            last_step, slot, blocks = entry
            if last_step <= self._answered or not self.in_flight:
                self._sharing.released(blocks)
                self.pool.release(blocks)
                self._free_slots.append(slot)
            else:
                waiting.append(entry)
        self._retiring = waiting
