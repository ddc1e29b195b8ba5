"""Which blocks the sequences of one worker share, copy and keep.

Full blocks are shared through the prefix cache; a block that is not full is copied. Both are
unproven until a token is sampled from them: if their prefill fails, all sequences that use them
run again.
"""

from collections.abc import Callable, Iterable

import numpy as np

from pagewire.scheduler.core.batching.cached_prefix import CachedPrefix
from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import BlockPool
from pagewire.scheduler.core.kv.partial_blocks import PartialBlocks
from pagewire.scheduler.core.sequence import Sequence


class PrefixSharing:
    """Shared, copied and kept blocks of one worker's pool."""

    __slots__ = ("_copied", "_copies_of", "_found", "_kept", "_limits", "_partials", "_pool")

    def __init__(self, limits: WorkerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        # The latest search in the prefix cache, and the blocks that it has found.
        self._found: tuple[tuple[int, int, int], tuple[list[int], list[int]]] = (
            (-1, -1, -1),
            ([], []),
        )
        self._partials = PartialBlocks()
        # By unproven block that is not full: the sequences that began with a copy of it.
        self._copies_of: dict[int, list[Sequence]] = {}
        # By slot, blocks to be copied: held until the step that copies them is planned.
        self._copied: dict[int, int] = {}
        # By arrival, blocks of ended sequences that others will continue.
        self._kept: dict[int, list[int]] = {}

    # Finding

    def find(self, sequence: Sequence) -> CachedPrefix:
        """The cached KV of the sequence's first tokens, at most `Sequence.max_cached` of them."""
        size = self._limits.block_size
        if not self._limits.prefix_caching:
            return CachedPrefix(size, [], [], None)
        blocks, host_blocks = self._find_full_blocks(sequence)
        if host_blocks:
            # Blocks to copy are found behind blocks of the device only.
            return CachedPrefix(size, blocks, host_blocks, None)
        begin = len(blocks) * size
        end = min(sequence.max_cached, begin + size - 1)
        rest = sequence.known_bytes(end, begin)
        partial = self._partials.find(blocks, rest, sequence.cache_salt)
        reach = self._limits.reach
        freed = 0 if reach is None else max(0, len(blocks) - reach)
        return CachedPrefix(size, blocks, [], partial, freed)

    def find_leader(
        self, sequence: Sequence, cached: CachedPrefix, prefilling: Iterable[int], table: SlotTable
    ) -> Sequence | None:
        """The sequence in a slot of `prefilling` that will compute the block after `cached`.

        None if there is none, or if the cached blocks are all that can be shared. Steps run in
        order, so a block can be shared as soon as the step that computes it is planned.
        """
        size = self._limits.block_size
        if not self._limits.prefix_caching or sequence.max_cached // size <= cached.num_full:
            return None
        begin = cached.num_full * size
        end = begin + size
        block = sequence.known_bytes(end, begin)
        for slot in prefilling:
            other = table.sequence(slot)
            if (
                other.num_known >= end > table.computed[slot]
                and other.cache_salt == sequence.cache_salt
                and other.known_bytes(end, begin) == block
                and other.known_bytes(begin) == sequence.known_bytes(begin)
            ):
                return other
        return None

    def num_shared(self, sequence: Sequence, other: Sequence) -> int:
        """The number of first tokens, in full blocks, that a sequence can share with another."""
        size = self._limits.block_size
        most = min(sequence.max_cached, other.num_known) // size
        mine, others = (
            np.frombuffer(each.known_bytes(most * size), np.int32).reshape(most, size)
            for each in (sequence, other)
        )
        differ = (mine != others).any(axis=1)
        return size * (int(differ.argmax()) if differ.any() else most)

    # Sharing

    def cache(self, sequence: Sequence, num_tokens: int, *, proven: bool) -> None:
        """Caches the full blocks of the sequence's first `num_tokens`.

        `proven`: their KV is computed, by an answer; otherwise the steps planned so far compute it.
        """
        if not self._limits.prefix_caching:
            return
        full = num_tokens // self._limits.block_size
        data = sequence.known_bytes(full * self._limits.block_size)
        self._pool.cache(sequence.blocks[:full], data, sequence.cache_salt, proven=proven)

    def offer_copies(self, sequence: Sequence, num_tokens: int, *, proven: bool) -> None:
        """Lets others copy the block with the end of the first `num_tokens`, if it is not full."""
        if self._limits.prefix_caching:
            data = sequence.known_bytes(num_tokens)
            block = self._partials.add(
                sequence.arrival, sequence.blocks, data, self._block_bytes, sequence.cache_salt
            )
            if block is not None and not proven:
                self._copies_of[block] = []

    def copy(self, sequence: Sequence, block: int) -> None:
        """Holds the block that a sequence copies when it starts; the sequence has its slot."""
        self._pool.acquire([block])
        self._copied[sequence.slot] = block
        if block in self._copies_of:
            self._copies_of[block].append(sequence)

    def drop_copy(self, slot: int) -> None:
        """Releases the block that the slot's sequence copies, once that step is planned.

        The step runs before any step that could write to the block for another sequence.
        """
        block = self._copied.pop(slot, None)
        if block is not None:
            self._pool.release([block])

    def withdraw(self, sequence: Sequence) -> None:
        """Stops copies of the last block of a sequence that leaves."""
        self._partials.remove(sequence.arrival)

    def forget_copies_of(self, blocks: list[int]) -> None:
        """Call it before `blocks` are released: another sequence may get them from then on."""
        for block in blocks if self._copies_of else ():
            self._copies_of.pop(block, None)

    # Soundness

    def prove(self, sequence: Sequence) -> None:
        """Notes that a token was sampled from the sequence's blocks, so their KV is sound."""
        self._pool.prove(sequence.held)
        last = (sequence.num_known - 1) // self._limits.block_size  # never a cached full block
        self._copies_of.pop(sequence.blocks[last], None)

    def drop_unproven(
        self,
        blocks: list[int],
        running: Callable[[], Iterable[Sequence]],
        preempt: Callable[[Sequence, bool], None],
    ) -> None:
        """Drops the unproven blocks of a failed sequence from the cache.

        Sequences that share or copied these blocks run again, and so do sequences that copied from
        those. `preempt` gets a sequence and whether its own KV is sound; it ignores a sequence that
        does not run any more.
        """
        dropped = self._pool.drop_unproven(blocks)
        for sequence in running() if dropped else ():
            if not dropped.isdisjoint(sequence.blocks):
                preempt(sequence, True)
        for block in blocks:
            for sequence in self._copies_of.pop(block, ()):
                preempt(sequence, False)

    # Keeping

    @property
    def keeps(self) -> bool:
        """Whether blocks of ended sequences are kept."""
        return bool(self._kept)

    def keep(self, sequence: Sequence) -> None:
        """Keeps all blocks of a sequence that ends, until `forget`."""
        if self._limits.prefix_caching:
            self._pool.acquire(sequence.held)
            self._kept[sequence.arrival] = sequence.held
            self.offer_copies(sequence, sequence.num_answered, proven=True)

    def forget(self, arrival: int) -> None:
        """Releases the kept blocks of an ended sequence, if there are any."""
        blocks = self._kept.pop(arrival, None)
        if blocks is not None:
            self._partials.remove(arrival)
            self._pool.release(blocks)

    def forget_all(self) -> None:
        """Releases all kept blocks."""
        for arrival in list(self._kept):
            self.forget(arrival)

    # Invariants

    def held(self) -> list[int]:
        """The blocks held here, once for each reference."""
        return [block for blocks in self._kept.values() for block in blocks] + [
            *self._copied.values()
        ]

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts the invariants."""
        kept = {block for blocks in self._kept.values() for block in blocks}
        self._partials.check(kept.union(*(sequence.held for sequence in running)))

    def _find_full_blocks(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Full blocks to share, and those in host memory that take less time to load than to
        compute."""
        # The head of the queue is looked up for every step while it waits.
        key = (sequence.arrival, sequence.max_cached, self._pool.version)
        if self._found[0] != key:
            size = self._limits.block_size
            known = sequence.known_bytes(sequence.max_cached // size * size)
            found = self._pool.match(known, sequence.cache_salt)
            here = self._pool.num_on_device(found)
            blocks, host_blocks = found[:here], found[here:]
            if host_blocks and not self._limits.host.load_pays(
                len(host_blocks), here * size, len(found) * size
            ):
                host_blocks = []
            self._found = (key, (blocks, host_blocks))
        return self._found[1]

    @property
    def _block_bytes(self) -> int:
        return 4 * self._limits.block_size
