"""Continuous batching on one worker: admission, the plan of each step, and its answer.

A step is planned before the answers to the steps ahead of it are known. So planning counts tokens
and never reads their values; only `commit` does, for stop ids.
"""

from collections import Counter, deque
from collections.abc import Callable, Sized

import numpy as np

from pagewire.packing import Int32Array
from pagewire.scheduler.core.batching.block_growth import BlockGrowth
from pagewire.scheduler.core.batching.cached_prefix import CachedPrefix, Restart
from pagewire.scheduler.core.batching.decode_list import DecodeList
from pagewire.scheduler.core.batching.isolation import Isolation
from pagewire.scheduler.core.batching.prefill_queue import PrefillQueue
from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing
from pagewire.scheduler.core.batching.slot_pool import SlotPool
from pagewire.scheduler.core.batching.slot_table import SlotArray, SlotTable
from pagewire.scheduler.core.batching.step_plan import StepOutcome, StepPlan
from pagewire.scheduler.core.batching.variable_advance import VariableAdvance
from pagewire.scheduler.core.batching.window import SlidingWindow
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import SCRATCH_BLOCK, BlockPool
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence, State


class WorkerBatch:
    """The sequences, slots and blocks of one worker."""

    def __init__(
        self,
        limits: WorkerLimits,
        policy: SchedulingPolicy,
        on_preempt: Callable[[Sequence], None],
        waiting: Sized = (),
    ) -> None:
        """`on_preempt` is called with each preempted sequence, to queue it again.

        `waiting` are the sequences that wait for admission.
        """
        self.limits = limits
        reach = limits.reach
        self.pool = BlockPool(limits.num_blocks, limits.block_size, limits.host, reach)
        self.slots = SlotTable(limits.num_slots)
        self.in_flight: deque[StepPlan] = deque()
        # When the worker joined, in seconds of the caller's clock.
        self.joined = 0.0
        # The most prompt tokens of a step that has decodes too.
        self.chunk_tokens = limits.max_num_batched_tokens
        self._policy = policy
        self._on_preempt = on_preempt
        self._next_step = 1
        # The step that was answered last.
        self._answered = StepPlan(0)
        self._slot_pool = SlotPool(limits.num_slots)
        self._sharing = PrefixSharing(limits, self.pool)
        self._window: SlidingWindow | None = None
        if reach is not None:
            self._window = SlidingWindow(reach, limits, self.slots, self.pool, self._sharing)
        self._variable: VariableAdvance | None = None
        if limits.max_drafts:
            self._variable = VariableAdvance(self.slots, 1 + limits.max_drafts)
        self._prefill = PrefillQueue(limits, self.slots, self._sharing, self._window, waiting)
        self._decode = DecodeList(self.slots, limits.prefix_groups, self._variable)
        self._growth = BlockGrowth(
            self.slots,
            self._slot_pool,
            self.pool,
            self._decode,
            self._sharing,
            policy,
            self._window,
            self._variable,
        )
        self._isolation = Isolation(self.slots, self._decode)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return int(np.count_nonzero(self.slots.live))

    @property
    def backlog(self) -> int:
        """Known tokens of admitted sequences that are in no step yet."""
        return self._prefill.backlog

    @property
    def isolated(self) -> Sequence | None:
        """The suspect whose steps run alone."""
        slot = self._isolation.alone
        return None if slot is None else self.slots.sequences[slot]

    @property
    def idle(self) -> bool:
        """Whether every slot is free, and so no sequence holds a block."""
        return self._slot_pool.num_free == self.limits.num_slots

    @property
    def unused_places(self) -> int:
        """Places for a token, in blocks of running sequences, for which no token is known yet."""
        table = self.slots
        taken = np.maximum(table.computed, table.known)
        # With a window, blocks for the last known tokens may be missing.
        return int(np.maximum(table.capacity - taken, 0)[table.live].sum())

    def running(self) -> list[Sequence]:
        """The sequences in live slots, by slot."""
        return [self.slots.sequence(int(slot)) for slot in np.flatnonzero(self.slots.live)]

    # Admission: questions

    @property
    def open(self) -> bool:
        """Whether a slot is free and the backlog leaves room in a step."""
        backlog_full = self._prefill.near_backlog >= self.limits.max_num_batched_tokens
        return self._slot_pool.num_free > 0 and not backlog_full

    def fits(self, sequence: Sequence) -> bool:
        """Whether the worker, with its whole pool, can run the sequence at its longest."""
        return (
            sequence.max_length <= self.limits.max_model_len
            and self.limits.least_blocks(sequence.max_computed) <= self.pool.total
        )

    def find_cached(self, sequence: Sequence) -> CachedPrefix:
        """The cached KV of the sequence's first tokens."""
        return self._sharing.find(sequence)

    def room_for(self, sequence: Sequence) -> CachedPrefix | None:
        """The cached prefix to `admit` the sequence with; None if it may not start now.

        The sequence needs a slot, and blocks for its known tokens, at most those that it may hold
        at once. Where `limits` require whole sequences, the pool must hold all of them at their
        longest. Beside running sequences, the part of the pool above the threshold stays free for
        them to grow. The sequence waits while another prefill is about to compute more of its
        beginning than is cached.
        """
        if not self.open or not self.fits(sequence):
            return None
        cached = self.find_cached(sequence)
        needed = self._blocks_needed(sequence, cached)
        if needed > self.pool.available or self._must_wait(sequence, cached):
            return None
        ceiling = self.limits.memory_threshold * self.pool.total
        if self.pool.used + needed > ceiling and self.num_running > 0:
            return None
        return cached

    def leader_of(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """A long prompt that will compute blocks for the sequence, and the number of shared tokens.

        None if there is no such prompt in a slot.
        """
        slots = self._prefill.long.slots
        if not slots or not self.fits(sequence):
            return None
        cached = self.find_cached(sequence)
        leader = self._sharing.find_leader(sequence, cached, slots, self.slots)
        return None if leader is None else (leader, self._sharing.num_shared(sequence, leader))

    def num_prefilled(self, sequence: Sequence) -> int | None:
        """The tokens of a sequence in prefill that the steps planned so far compute.

        None if its prefill has ended, or if it is not in this batch.
        """
        if sequence.state is not State.PREFILL or not self.slots.holds(sequence):
            return None
        return int(self.slots.computed[sequence.slot])

    def prefill_cost(self, sequence: Sequence, cached: CachedPrefix) -> float:
        """Tokens to compute, with loads from host memory counted as tokens that take as long."""
        computed = sequence.num_known - cached.num_tokens
        if not cached.host_blocks:
            return computed
        host = self.limits.host
        return computed + len(cached.host_blocks) * host.load_block / host.prefill_token

    # Admission: actions

    def make_room(self, sequence: Sequence) -> None:
        """Releases the blocks kept of ended sequences if the sequence lacks nothing but blocks."""
        if not self._sharing.keeps or not self.open or not self.fits(sequence):
            return
        cached = self.find_cached(sequence)
        lacking = self._blocks_needed(sequence, cached) > self.pool.available
        if lacking and not self._must_wait(sequence, cached):
            self._sharing.forget_all()

    def admit(self, sequence: Sequence, cached: CachedPrefix) -> Restart | None:
        """Starts the sequence with the prefix that `room_for` has just found.

        Assigns a slot, and blocks for the known tokens or the first of them that the sequence may
        hold at once (`WorkerLimits.most_blocks`). Full cached blocks are shared or loaded from host
        memory, one that is not full is copied, and their tokens are not computed. Returns how the
        sequence starts again if it was preempted.
        """
        self.pool.acquire(cached.held)
        more = self._new_blocks(sequence, cached)
        sequence.blocks = cached.blocks + self.pool.bring(cached.blocks, cached.host_blocks, more)
        sequence.num_freed = cached.num_freed
        self.pool.note_hits(sequence.blocks[cached.num_freed : cached.num_full])
        sequence.slot = self._slot_pool.take()
        sequence.state = State.PREFILL
        restart = cached.restart(sequence.num_known) if sequence.preempted else None
        sequence.preempted = False
        copied = cached.partial.block if cached.partial else SCRATCH_BLOCK
        sequence.start(cached.num_tokens, copied, cached.num_loaded)
        if copied:
            self._sharing.copy(sequence, copied)
        self.slots.occupy(sequence.slot, sequence, len(sequence.blocks) * self.limits.block_size)
        if self._window is not None:
            self._window.occupy(sequence.slot)
        if self._variable is not None:
            self._variable.occupy(sequence.slot, sequence)
        self._prefill.add(sequence)
        self._policy.admitted(sequence)
        if sequence.suspect:
            self._isolation.add(sequence)
        return restart

    def _blocks_needed(self, sequence: Sequence, cached: CachedPrefix) -> int:
        """Blocks that are free or idle now and that the sequence would hold.

        With a window, also the blocks that running prefills still lack: an admission that took
        those could stop all prefills.
        """
        new = self._new_blocks(sequence, cached) + len(cached.host_blocks)
        if self._window is not None:
            new += self._window.wanted(self._prefill.slots)
        return new + self.pool.num_idle(cached.held)

    def _new_blocks(self, sequence: Sequence, cached: CachedPrefix) -> int:
        """Blocks that the sequence gets beside the cached ones."""
        num_known = sequence.num_known
        held = self.limits.blocks_for(num_known) - cached.num_freed
        return min(held, self.limits.most_blocks(num_known)) - (cached.num_full - cached.num_freed)

    def _must_wait(self, sequence: Sequence, cached: CachedPrefix) -> bool:
        """Whether another prefill computes the sequence's beginning, or not all would fit whole."""
        slots, table = self._prefill.slots, self.slots
        return self._sharing.find_leader(sequence, cached, slots, table) is not None or (
            self.limits.whole_sequences and not self._fits_whole(sequence)
        )

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether the pool holds the sequence and all running ones at their longest."""
        sequences = [*self.running(), sequence]
        longest = sum(self.limits.most_blocks(each.max_computed) for each in sequences)
        return longest + self._slot_pool.num_retired_blocks <= self.pool.total

    # Steps

    def plan(self) -> StepPlan | None:
        """The next step, to be sent at once; None when there is nothing to compute."""
        if self._isolation and not self._isolation.isolate(
            bool(self.in_flight), self._prefill.slots, self._growth.stalled
        ):
            return None
        plan = StepPlan(self._next_step)
        self._growth.grow(plan, self._preempt)
        self._decode.put_into(plan)
        self._decode.advance(plan)
        self._prefill.put_into(plan, self.chunk_tokens, self._isolation.alone)
        if plan.completed:
            self._start_decoding(plan)
        if plan.num_tokens == 0:
            if self._isolation.first_is_done:
                return self.plan()  # it was preempted as no block was free: others continue
            if self._window is not None and self._prefill.slots and not self.in_flight:
                # Prefills hold all blocks, and none has enough to continue.
                self._preempt(self._policy.victim(self.running()))
                return self.plan()
            return None
        self._next_step += 1
        self._decode.sent()
        plan.copies = self.pool.take_copies()
        if self._window is not None:
            self._window.put_into(plan)
        self.in_flight.append(plan)
        return plan

    def commit(self, number: int, tokens: Int32Array, duration_us: int = 0) -> StepOutcome:
        """Takes the answer to the oldest step in flight; `tokens` is parallel to its rows.

        `duration_us` is the time that the step took on the worker, 0 if it is not known.
        On a worker that speculates, `tokens` are the first ones of the rows; `commit_more` takes
        the next ones, then `settle` ends the answer.

        Raises ValueError if the answer is to another step or has another number of rows.
        """
        if not self.in_flight or self.in_flight[0].number != number:
            raise ValueError(f"answer to step {number}, which is not the oldest in flight")
        plan = self.in_flight[0]
        rows = plan.rows
        if len(tokens) != len(rows):
            raise ValueError(f"step {number} has {len(rows)} rows, its answer {len(tokens)}")
        self._answered = self.in_flight.popleft()
        self._prefill.long.answered(plan, duration_us)
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
        if self._window is not None:
            self._window.answered(plan, rows)
        self._release_answered()
        return StepOutcome(rows, tokens, indices, stopped, ended, None if complete else valid)

    def note_rejected(self, rows: SlotArray, counts: Int32Array) -> None:
        """Counts the wrong predicted tokens of `rows [n]` of the step committed last."""
        if self._variable is not None:
            self._variable.note_rejected(self._answered.rows[rows], counts)

    def note_accepted(self, rows: SlotArray) -> None:
        """Counts the tokens of `rows [n]` committed last as accepted tokens of predictions."""
        if self._variable is not None:
            slots = self._answered.rows[rows]
            self._variable.note_accepted(slots[self.slots.live[slots]])

    def commit_more(self, rows: SlotArray, tokens: Int32Array) -> StepOutcome:
        """Takes one more token for each of some `rows [n]` of the step that was committed last.

        Sequences that its earlier tokens have ended must be finished before.
        """
        table, slots = self.slots, self._answered.rows[rows]
        valid = table.live[slots]
        complete = np.count_nonzero(valid) == len(rows)
        if not complete:
            slots, tokens = slots[valid], tokens[valid]
        indices = table.append(slots, tokens)
        stopped, ended = table.stopped(slots, tokens), table.full(slots)
        return StepOutcome(slots, tokens, indices, stopped, ended, None if complete else valid)

    def settle(self) -> None:
        """Ends an answer, once all its tokens are committed and ended sequences are finished."""
        self._decode.settle(self._answered)

    def slots_in_flight(self) -> set[int]:
        """Slots that steps in flight compute, those of ended sequences included."""
        named = {slot for plan in self.in_flight for slot in plan.prefill_slots}
        return named.union(*(plan.rows.tolist() for plan in self.in_flight))

    def _start_decoding(self, plan: StepPlan) -> None:
        """Starts decoding in the slots whose prefill ends in this step with a sampled token."""
        table = self.slots
        for slot in plan.completed:
            table.sequence(slot).state = State.DECODE
            table.sampled[slot] += 1
            if table.sampled[slot] < table.limit[slot]:
                self._decode.set(slot, True)
            else:
                plan.ends = True
        plan.rows = np.concatenate([plan.rows, np.array(plan.completed, dtype=np.intp)])

    # The end of a sequence

    def finish(
        self, slot: int, state: State, sound: bool = True, *, keep: bool = False
    ) -> Sequence:
        """Ends the sequence in a live slot with a final state, or PENDING to run it again.

        Its full blocks stay cached if they are `sound`; otherwise see `slot_failed`. With `keep`
        all its blocks stay until `forget`, or until other sequences need the memory.
        """
        sequence = self.slots.sequence(slot)
        assert self.slots.live[slot], f"slot {slot} is not live"
        self._prefill.discard(slot)
        self._sharing.drop_copy(slot)
        self._growth.stalled.discard(slot)
        self._decode.discard(slot)
        self.slots.vacate(slot)
        if self._window is not None:
            self._window.vacate(slot)
        if self._variable is not None:
            self._variable.vacate(slot, sequence)
        sequence.state = state
        sequence.slot = -1
        self._sharing.withdraw(sequence)
        if sound:
            self._sharing.cache(sequence, sequence.num_answered, proven=True)
        if keep:
            self._sharing.keep(sequence)
        blocks, sequence.blocks, sequence.num_freed = sequence.held, [], 0
        self._slot_pool.retire(slot, int(self.slots.last_step[slot]), blocks)
        if not sound:
            self._drop_unproven(blocks)
        self._policy.left(sequence)
        self._release_answered()
        return sequence

    def slot_failed(self, slot: int) -> None:
        """Notes that the oldest step in flight has failed for a slot; call it before `commit`.

        If the sequence has left already, its unproven blocks are dropped from the cache, and the
        sequences that share them are preempted. For a sequence that still runs, `finish` does the
        same. Raises ValueError if there is no such slot.
        """
        if not 0 <= slot < self.limits.num_slots:
            raise ValueError(f"slot {slot} has failed, and there are {self.limits.num_slots}")
        if self._window is not None:
            self._window.stop(slot)
        for retired in list(self._slot_pool.retired):
            if retired.slot == slot:
                self._drop_unproven(retired.blocks)

    def forget(self, arrival: int) -> None:
        """Releases the kept blocks of an ended sequence, if there are any."""
        self._sharing.forget(arrival)

    def remove_all(self) -> list[Sequence]:
        """Removes every sequence from a lost worker; the batch must not be used again."""
        return [self.finish(sequence.slot, State.PENDING) for sequence in self.running()]

    def _preempt(self, victim: Sequence, sound: bool = True) -> None:
        """Takes a sequence out of its slot to queue it again; does nothing if it has left."""
        if not self.slots.holds(victim):
            return
        victim.preempted = True
        blocks = victim.held
        self.finish(victim.slot, State.PENDING, sound)
        self.pool.expect(blocks)
        self._on_preempt(victim)

    def _drop_unproven(self, blocks: list[int]) -> None:
        self._sharing.drop_unproven(blocks, self.running, self._preempt)

    def _release_answered(self) -> None:
        """Frees the slots and blocks of sequences whose last steps have been answered."""
        unanswered = self.in_flight[0].number if self.in_flight else self._next_step
        for blocks in self._slot_pool.release(unanswered - 1):
            self._sharing.forget_copies_of(blocks)
            self.pool.release(blocks)

    # Invariants

    def check(self) -> None:
        """Asserts the invariants over pool, slots and sequences."""
        self.pool.check()
        running = self.running()
        self._sharing.check(running)
        held = Counter(block for sequence in running for block in sequence.held)
        held.update(block for retired in self._slot_pool.retired for block in retired.blocks)
        held.update(self._sharing.held())
        held.update(block for blocks in self.pool.loading for block in blocks)
        assert len(held) == self.pool.used, "a held block has no owner"
        assert all(self.pool.references(b) == count for b, count in held.items()), "a miscount"
        busy = self.num_running + len(self._slot_pool.retired)
        assert busy + self._slot_pool.num_free == self.limits.num_slots, "a slot was lost"
        self.slots.check(self.limits.block_size)
        self._prefill.check()
        assert all(p.num_tokens <= self.limits.max_num_batched_tokens for p in self.in_flight)
