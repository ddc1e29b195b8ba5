"""Continuous batching on one worker: what each step computes, and what its answer means.

A step is planned before the answers to the steps ahead of it are known, so everything here
counts tokens and never looks at their values; values matter only in `commit`, for stop ids.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.block_pool import SCRATCH_BLOCK, BlockPool
from pagewire.scheduler.core.partial_blocks import PartialBlocks, PartialPrefix
from pagewire.scheduler.core.policy import SchedulingPolicy
from pagewire.scheduler.core.prefix_groups import PrefixGroup, PrefixGroups
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.core.slot_table import SlotTable

_NO_SLOTS: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker can hold and compute."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    memory_threshold: float
    prefix_caching: bool = True
    # Whether the worker wants to be told which decoding slots share blocks.
    prefix_groups: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the cache has of a sequence's first tokens: `blocks` to share and one to copy."""

    blocks: list[int]
    partial: PartialPrefix | None

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * block_size + (self.partial.tokens if self.partial else 0)


_NOTHING_CACHED = CachedPrefix([], None)


@dataclass(slots=True)
class StepPlan:
    """One step: deltas for the worker, and the rows that its answer will have.

    `rows` are the slots that sample, in the order of the answer: `decode_slots`, then the
    prefill chunks that reach the last known token.
    """

    number: int
    starts: list[Sequence] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_counts: list[int] = field(default_factory=list)
    decode_slots: Int32Array = field(default_factory=lambda: _NO_SLOTS)
    decode_changed: bool = False
    # Which decode slots share leading blocks; the worker knows unless `groups_changed`.
    groups: list[PrefixGroup] = field(default_factory=list)
    groups_changed: bool = False
    rows: Int32Array = field(default_factory=lambda: _NO_SLOTS)
    # Slots whose last known token is computed in this step.
    completed: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_slots) + sum(self.prefill_counts)


@dataclass(slots=True)
class StepOutcome:
    """New tokens of live sequences; all arrays but `valid` are parallel [n].

    `indices` are positions in the outputs. `stopped` marks tokens that are stop ids, `ended`
    those that are the last by length. The caller finishes the sequences of both. `valid` marks
    the rows of the answer that are such tokens.
    """

    slots: Int32Array
    tokens: Int32Array
    indices: NDArray[np.int64]
    stopped: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    valid: NDArray[np.bool_]

    def only(self, rows: NDArray[np.bool_]) -> "StepOutcome":
        """Those of some rows."""
        return StepOutcome(
            self.slots[rows],
            self.tokens[rows],
            self.indices[rows],
            self.stopped[rows],
            self.ended[rows],
            self.valid,
        )


class WorkerBatch:
    """The sequences, slots and blocks of one worker.

    Slots and blocks of a sequence that leaves are reused only after every step that names them
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
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.slots = SlotTable(limits.num_slots)
        self.in_flight: deque[StepPlan] = deque()
        self.preemptions = 0
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
        # Admitted suspects; the slot of the one whose steps run alone, and the slots that wait.
        self._suspects: deque[Sequence] = deque()
        self._alone: int | None = None
        self._held: list[int] = []
        self._decode = _NO_SLOTS
        # Dirty: a slot entered or left the list; unsent: the worker does not know the list yet.
        self._decode_dirty = False
        self._decode_unsent = False
        self._groups = PrefixGroups() if limits.prefix_groups else None
        self._groups_unsent = False
        self._next_step = 1
        self._answered = 0
        # The latest question to the prefix cache, and its answer.
        self._matched: tuple[tuple[int, int, int], list[int]] = ((-1, -1, -1), [])
        self._partials = PartialBlocks()
        # By block from whose tokens nobody has sampled yet: who began with a copy of it.
        self._copies_of: dict[int, list[Sequence]] = {}
        # By slot, blocks to be copied: held until the step that copies them is planned.
        self._copied: dict[int, int] = {}
        # By arrival, blocks of ended sequences that others will go on from.
        self._kept: dict[int, list[int]] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return int(self.slots.live.sum())

    @property
    def backlog(self) -> int:
        """Known tokens of admitted sequences that are in no step yet."""
        return self._backlog

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
        """Whether the whole pool is enough for the sequence at its longest."""
        return self.limits.blocks_for(sequence.max_computed) <= self.pool.total

    @property
    def open(self) -> bool:
        """Whether a sequence that needs little enough memory could start now."""
        return bool(self._free_slots) and self._backlog < self.limits.max_num_batched_tokens

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of its first tokens are in the cache."""
        return self._cached_prefix(sequence).num_tokens(self.limits.block_size)

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether the sequence may start now.

        It needs a slot and blocks for its known tokens. Beside running sequences it must leave
        the part of the pool above the threshold free for them to grow into. It waits while the
        prefill of another one is about to compute more of its beginning than is cached.
        """
        if not self.open or not self.fits(sequence):
            return False
        cached = self._cached_prefix(sequence).blocks
        if self._is_being_computed(sequence, len(cached)):
            return False
        need = self.limits.blocks_for(sequence.num_known) - len(cached)
        woken = self.pool.num_idle(cached)
        if need > self.pool.available - woken:
            if not self._kept:
                return False
            self._forget_all()
            return self.can_admit(sequence)
        ceiling = self.limits.memory_threshold * self.pool.total
        return self.pool.used + need + woken <= ceiling or self.num_running == 0

    def admit(self, sequence: Sequence) -> None:
        """Gives the sequence a slot and blocks for its known tokens; `can_admit` must hold.

        Blocks that are cached for its first tokens are shared, one that is not full is copied, and
        those tokens are not computed.
        """
        slot = self._free_slots.pop()
        cached = self._cached_prefix(sequence)
        self.pool.acquire(cached.blocks)
        need = self.limits.blocks_for(sequence.num_known) - len(cached.blocks)
        sequence.blocks = cached.blocks + self.pool.allocate(need)
        sequence.slot = slot
        sequence.state = State.PREFILL
        copied = cached.partial.block if cached.partial else SCRATCH_BLOCK
        sequence.start(cached.num_tokens(self.limits.block_size), copied)
        if copied:
            self.pool.acquire([copied])
            self._copied[slot] = copied
            if copied in self._copies_of:
                self._copies_of[copied].append(sequence)
        capacity = len(sequence.blocks) * self.limits.block_size
        self.slots.occupy(slot, sequence, capacity)
        self._prefilling.append(slot)
        self._backlog += sequence.num_known - sequence.num_computed
        self._to_start.append(sequence)
        self._policy.admitted(sequence)
        if sequence.suspect:
            self._suspects.append(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, to be sent at once; None when there is nothing to compute.

        A suspect's steps run alone, one at a time: then nobody else is there when the worker falls.
        """
        if self._suspects and not self._isolate():
            return None
        plan = StepPlan(self._next_step)
        self._plan_decode(plan)
        self._plan_prefill(plan)
        if plan.num_tokens == 0:
            if self._suspects and self._is_done_with(self._suspects[0]):
                return self.plan()  # it gave its place up for want of a block: others go on
            return None
        self._next_step += 1
        self._decode_unsent = self._groups_unsent = False
        self.in_flight.append(plan)
        return plan

    def commit(self, number: int, tokens: Int32Array) -> StepOutcome:
        """Takes the answer to the oldest step in flight; `tokens` is parallel to its rows.

        Raises ValueError if the answer is not to that step or has another number of rows.
        """
        if not self.in_flight or self.in_flight[0].number != number:
            raise ValueError(f"answer to step {number}, which is not the oldest in flight")
        rows, completed = self.in_flight[0].rows, self.in_flight[0].completed
        if len(tokens) != len(rows):
            raise ValueError(f"step {number} has {len(rows)} rows, its answer {len(tokens)}")
        self.in_flight.popleft()
        self._answered = number
        table = self.slots
        valid = table.live[rows] & (tokens >= 0)
        if not valid.all():
            rows, tokens = rows[valid], tokens[valid]
        indices = table.append(rows, tokens)
        stopped = (table.stop_ids[rows] == tokens[:, None]).any(axis=1)
        ended = indices + 1 >= table.limit[rows]
        self._prove(completed)
        self._release_answered()
        return StepOutcome(rows, tokens, indices, stopped, ended, valid)

    def finish(
        self, slot: int, state: State, sound: bool = True, *, keep: bool = False
    ) -> Sequence:
        """Ends the sequence in a live slot with a final state, or PENDING to run it again.

        Its full blocks stay cached unless it is not `sound`: see `distrust`.
        With `keep` its last block, too, is there to begin with, until `forget` or until others need
        the memory.
        """
        sequence = self._sequence(slot)
        assert self.slots.live[slot], f"slot {slot} is not live"
        self._withdraw(slot)
        self.slots.vacate(slot)
        sequence.state = state
        sequence.slot = -1
        self._partials.remove(sequence.arrival)
        if sound:
            self._cache(sequence, sequence.num_answered, proven=True)
        if keep and self.limits.prefix_caching:
            self.pool.acquire(sequence.blocks)
            self._kept[sequence.arrival] = sequence.blocks
            self._offer_copies(sequence, sequence.num_answered, proven=True)
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
        For one that still runs, `finish` does the same.
        """
        for _, left, blocks in list(self._retiring):
            if left == slot:
                self._drop_unproven(blocks)

    def forget(self, arrival: int) -> None:
        """Lets go of what was kept of an ended sequence, if there is anything."""
        blocks = self._kept.pop(arrival, None)
        if blocks is not None:
            self._partials.remove(arrival)
            self.pool.release(blocks)

    def named_slots(self) -> set[int]:
        """Slots that steps in flight compute, those of sequences that have ended included."""
        named = {slot for plan in self.in_flight for slot in plan.prefill_slots}
        return named.union(*(plan.rows.tolist() for plan in self.in_flight))

    def running(self) -> list[Sequence]:
        """The sequences in live slots, by slot."""
        return [self._sequence(int(slot)) for slot in np.flatnonzero(self.slots.live)]

    def evacuate(self) -> list[Sequence]:
        """Takes every sequence off a worker that is lost; the batch must not be used again."""
        return [self.finish(sequence.slot, State.PENDING) for sequence in self.running()]

    def check(self) -> None:
        """Asserts the invariants over pool, slots and sequences."""
        self.pool.check()
        held = Counter(block for s in self.running() for block in s.blocks)
        held.update(block for blocks in self._kept.values() for block in blocks)
        self._partials.check(set(held))
        held.update(block for _, _, blocks in self._retiring for block in blocks)
        held.update(self._copied.values())
        assert len(held) == self.pool.used, "a held block has no owner"
        assert all(self.pool.references(b) == count for b, count in held.items()), "a miscount"
        busy = self.num_running + len(self._retiring)
        assert busy + len(self._free_slots) == self.limits.num_slots, "a slot was lost"
        table = self.slots
        for slot in np.flatnonzero(table.live):
            sequence = self._sequence(int(slot))
            assert table.received[slot] <= table.sampled[slot] <= table.limit[slot]
            assert table.computed[slot] <= table.capacity[slot]
            assert table.capacity[slot] == len(sequence.blocks) * self.limits.block_size
        assert all(p.num_tokens <= self.limits.max_num_batched_tokens for p in self.in_flight)

    def _forget_all(self) -> None:
        for arrival in list(self._kept):
            self.forget(arrival)

    def _cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """What is cached of the sequence's first tokens; one token is always computed."""
        if not self.limits.prefix_caching:
            return _NOTHING_CACHED
        blocks = self._cached_blocks(sequence)
        begin = len(blocks) * self.limits.block_size
        end = min(sequence.num_known, begin + self.limits.block_size) - 1
        rest = sequence.known_bytes(end, begin)
        partial = self._partials.find(blocks, rest, sequence.cache_salt)
        return CachedPrefix(blocks, partial)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        # The head of the queue asks at every step while it waits, and once more when admitted.
        question = (sequence.arrival, sequence.num_known, self.pool.version)
        if self._matched[0] != question:
            tokens = self._shareable(sequence) * self.limits.block_size
            found = self.pool.match(sequence.known_bytes(tokens), sequence.cache_salt)
            self._matched = (question, found)
        return self._matched[1]

    @property
    def _block_bytes(self) -> int:
        return 4 * self.limits.block_size

    def _offer_copies(self, sequence: Sequence, num_tokens: int, *, proven: bool) -> None:
        """Lets others copy the block with the end of the first `num_tokens`, if it is not full."""
        if self.limits.prefix_caching:
            data = sequence.known_bytes(num_tokens)
            block = self._partials.add(
                sequence.arrival, sequence.blocks, data, self._block_bytes, sequence.cache_salt
            )
            if block is not None and not proven:
                self._copies_of[block] = []

    def _shareable(self, sequence: Sequence) -> int:
        """Full blocks that the sequence could share: one token is always computed."""
        return (sequence.num_known - 1) // self.limits.block_size

    def _is_being_computed(self, sequence: Sequence, cached: int) -> bool:
        """Whether a running prefill will compute the block after the first `cached` ones.

        Steps run in order, so a block can be shared from the plan on in which it is computed, and
        this ends with that plan: soon, because every plan goes on with the prefills in their
        order, and nothing is admitted anyway while a whole step's budget of them is left.
        """
        size = self.limits.block_size
        if not self.limits.prefix_caching or self._shareable(sequence) <= cached:
            return False
        begin, end = cached * size, (cached + 1) * size
        block = sequence.known_bytes(end, begin)
        for slot in self._prefilling:
            other = self._sequence(slot)
            if (
                other.num_known >= end > self.slots.computed[slot]
                and other.cache_salt == sequence.cache_salt
                and other.known_bytes(end, begin) == block
                and other.known_bytes(begin) == sequence.known_bytes(begin)
            ):
                return True
        return False

    def _prove(self, slots: list[int]) -> None:
        """The last known token of these slots was answered for, and sampled from."""
        for slot in slots:
            if self.slots.live[slot]:
                sequence = self._sequence(slot)
                if self.slots.received[slot] > sequence.num_generated:  # else its row failed
                    self.pool.prove(sequence.blocks)
                    self._copies_of.pop(sequence.blocks[self._shareable(sequence)], None)

    def _drop_unproven(self, blocks: list[int]) -> None:
        """Drops the unproven end of what a failed sequence shared; who shares it runs again.

        So does who has copied from it, and from them in turn.
        """
        dropped = self.pool.drop_unproven(blocks)
        for sequence in self.running() if dropped else ():
            if not dropped.isdisjoint(sequence.blocks):
                self._preempt(sequence)
        for block in blocks:
            for sequence in self._copies_of.pop(block, ()):
                if self._runs(sequence):
                    self._preempt(sequence, sound=False)

    def _cache(self, sequence: Sequence, num_tokens: int, *, proven: bool) -> None:
        """Caches the full blocks of the sequence's first `num_tokens`, of which the KV is answered
        for if `proven`, otherwise computed by the steps planned so far."""
        if not self.limits.prefix_caching:
            return
        full = num_tokens // self.limits.block_size
        data = sequence.known_bytes(full * self.limits.block_size)
        self.pool.cache(sequence.blocks[:full], data, sequence.cache_salt, proven=proven)

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.slots.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def _isolate(self) -> bool:
        """Leaves one suspect alone on the worker, or nobody if none is left; False to wait."""
        while self._suspects and self._is_done_with(self._suspects[0]):
            self._suspects.popleft()
        slot = self._suspects[0].slot if self._suspects else None
        if slot is not None and self.in_flight:
            return False
        if slot != self._alone:
            self._alone = slot
            held, self._held = self._held, []
            for other in held:
                if self.slots.live[other] and other not in self._prefilling:
                    self._set_decoding(other, True)
            if slot is not None:
                self._hold_others(slot)
        return True

    def _is_done_with(self, suspect: Sequence) -> bool:
        """Whether a suspect has left, or has recovered and is one no longer."""
        slot = suspect.slot
        if slot < 0 or self.slots.sequences[slot] is not suspect:
            return True
        suspect.suspect = not suspect.recovered(int(self.slots.received[slot]))
        return not suspect.suspect

    def _hold_others(self, slot: int) -> None:
        decoding = np.flatnonzero(self.slots.decoding).tolist()
        self._held = [other for other in {*decoding, *self._stalled} if other != slot]
        for other in self._held:
            self._stalled.discard(other)
            self._set_decoding(other, False)

    def _plan_decode(self, plan: StepPlan) -> None:
        table = self.slots
        self._refresh_decode()
        full = self._decode[table.computed[self._decode] >= table.capacity[self._decode]]
        if not self._stalled and len(full) <= self.pool.available:
            self._append_blocks(full, plan)
        else:
            self._grow_all({*full.tolist(), *self._stalled}, plan)
            self._refresh_decode()
        decode = plan.decode_slots = plan.rows = self._decode
        plan.decode_changed = self._decode_unsent
        if self._groups is not None:
            self._groups_unsent |= self._groups.refresh()
            plan.groups, plan.groups_changed = self._groups.groups, self._groups_unsent
        if not len(decode):
            return
        table.computed[decode] += 1
        table.sampled[decode] += 1
        table.last_step[decode] = plan.number
        last = decode[table.sampled[decode] >= table.limit[decode]]
        if len(last):
            table.decoding[last] = False
            self._decode_dirty = True

    def _refresh_decode(self) -> None:
        """Rebuilds the decode list if a slot has entered or left it."""
        if self._decode_dirty:
            self._decode = np.flatnonzero(self.slots.decoding).astype(np.int32)
            self._decode_dirty = False
            self._decode_unsent = True
            self._regroup()

    def _regroup(self) -> None:
        """Tells the groups which slots have left or entered the decode list."""
        groups = self._groups
        if groups is None:
            return
        decode = self._decode.tolist()
        for slot in groups.slots() - {*decode}:
            groups.discard(slot)
        for slot in decode:
            if slot not in groups:
                groups.add(slot, self._sequence(slot).blocks)

    def _append_blocks(self, slots: Int32Array, plan: StepPlan) -> None:
        """Gives each slot one more block; the pool has enough."""
        if not len(slots):
            return
        named, blocks = slots.tolist(), self.pool.allocate(len(slots))
        for slot, block in zip(named, blocks, strict=True):
            self._sequence(slot).blocks.append(block)
        self.slots.capacity[slots] += self.limits.block_size
        plan.append_slots += named
        plan.append_blocks += blocks

    def _grow_all(self, slots: set[int], plan: StepPlan) -> None:
        """Gives each slot one more block, in the order of the policy, while memory is short.

        In that order a victim always comes after the slot it gives way to, so a block that this
        plan has already appended is never taken away again.
        """
        for slot in sorted(slots, key=lambda s: self._policy.key(self._sequence(s))):
            if self.slots.live[slot]:
                self._grow(slot, plan)

    def _grow(self, slot: int, plan: StepPlan) -> None:
        """Gives a slot one more block, or takes it out of this step.

        When no block is free a victim gives way. Its blocks may still be named by steps in
        flight; until those are answered the slot stalls.
        """
        table = self.slots
        self._stalled.discard(slot)
        if self.pool.available == 0:
            self._forget_all()
        while self.pool.available == 0 and self._awaited_blocks() <= len(self._stalled):
            self._preempt(self._policy.victim(self._evictable()))
            if not table.live[slot]:
                return
        if self.pool.available == 0:
            self._stalled.add(slot)
            self._set_decoding(slot, False)
            return
        block = self.pool.allocate(1)[0]
        self._sequence(slot).blocks.append(block)
        table.capacity[slot] += self.limits.block_size
        self._set_decoding(slot, True)
        plan.append_slots.append(slot)
        plan.append_blocks.append(block)

    def _set_decoding(self, slot: int, decoding: bool) -> None:
        if self.slots.decoding[slot] != decoding:
            self.slots.decoding[slot] = decoding
            self._decode_dirty = True

    def _ending(self) -> NDArray[np.bool_]:
        """Slots whose last token is in flight: their blocks come back without a preemption."""
        return self.slots.live & (self.slots.sampled >= self.slots.limit)

    def _awaited_blocks(self) -> int:
        """Blocks that come back once the steps in flight are answered."""
        retiring = sum(len(blocks) for _, _, blocks in self._retiring)
        ending = sum(len(self._sequence(int(s)).blocks) for s in np.flatnonzero(self._ending()))
        return retiring + ending

    def _evictable(self) -> list[Sequence]:
        slots = np.flatnonzero(self.slots.live & ~self._ending())
        return [self._sequence(int(slot)) for slot in slots]

    def _runs(self, sequence: Sequence) -> bool:
        return sequence.slot >= 0 and self.slots.sequences[sequence.slot] is sequence

    def _preempt(self, victim: Sequence, sound: bool = True) -> None:
        victim.preemptions += 1
        self.preemptions += 1
        self._on_preempt(self.finish(victim.slot, State.PENDING, sound))

    def _plan_prefill(self, plan: StepPlan) -> None:
        table = self.slots
        budget = self.limits.max_num_batched_tokens - len(plan.decode_slots)
        if len(plan.decode_slots):
            budget = min(budget, self.chunk_tokens)
        completed = []
        for slot in self._prefilling:
            if budget <= 0:
                break
            if self._alone not in (None, slot):
                continue
            known = self._sequence(slot).num_known
            count = min(budget, known - int(table.computed[slot]))
            budget -= count
            self._backlog -= count
            plan.prefill_slots.append(slot)
            plan.prefill_counts.append(count)
            table.computed[slot] += count
            table.last_step[slot] = plan.number
            self._cache(self._sequence(slot), int(table.computed[slot]), proven=False)
            if table.computed[slot] == known:
                completed.append(slot)
                self._offer_copies(self._sequence(slot), known - 1, proven=False)
        plan.completed = completed
        if self._to_start:
            named = set(plan.prefill_slots)
            plan.starts = [s for s in self._to_start if s.slot in named]
            for sequence in plan.starts:
                self._drop_copy(sequence.slot)
            self._to_start = [s for s in self._to_start if s.slot not in named]
        if completed:
            self._start_decoding(completed)
            plan.rows = np.concatenate([plan.rows, np.array(completed, dtype=np.int32)])

    def _start_decoding(self, slots: list[int]) -> None:
        """Prefill of these slots ends in the step being planned, which samples a token of each."""
        table = self.slots
        for slot in slots:
            self._prefilling.remove(slot)
            self._sequence(slot).state = State.DECODE
            table.sampled[slot] += 1
            if table.sampled[slot] < table.limit[slot]:
                self._set_decoding(slot, True)

    def _withdraw(self, slot: int) -> None:
        """Takes a slot out of whatever future steps would compute of it."""
        if slot in self._prefilling:
            self._prefilling.remove(slot)
            self._backlog -= self._sequence(slot).num_known - int(self.slots.computed[slot])
        self._to_start = [s for s in self._to_start if s.slot != slot]
        self._drop_copy(slot)
        self._stalled.discard(slot)
        self._set_decoding(slot, False)
        if self._groups is not None:
            self._groups.discard(slot)

    def _drop_copy(self, slot: int) -> None:
        """Lets go of the block that the slot's sequence copies.

        A step that copies it runs before any step that could write to it for another sequence.
        """
        block = self._copied.pop(slot, None)
        if block is not None:
            self.pool.release([block])

    def _release_answered(self) -> None:
        waiting = []
        for entry in self._retiring:
            last_step, slot, blocks = entry
            if last_step <= self._answered or not self.in_flight:
                for block in blocks if self._copies_of else ():
                    self._copies_of.pop(block, None)
                self.pool.release(blocks)
                self._free_slots.append(slot)
            else:
                waiting.append(entry)
        self._retiring = waiting
