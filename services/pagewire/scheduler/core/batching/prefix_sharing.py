"""What the sequences of one worker share of their beginnings, and what hangs on its soundness.

Full blocks are shared through the prefix cache, a block that is not full is copied. Until a token
was sampled from them both are unproven: when their prefill fails, whoever has them runs again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import BlockPool
from pagewire.scheduler.core.kv.partial_blocks import PartialBlocks, PartialPrefix
from pagewire.scheduler.core.sequence import Sequence


class Return(Enum):
    """Where most of the KV of a preempted sequence comes from when it starts again."""

    KEPT = "kept"  # it was still on the device
    SWAPPED = "swapped"  # from the host
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the cache has of a sequence's first tokens: `blocks` to share, then `host_blocks` to
    load, and one to copy."""

    blocks: list[int]
    host_blocks: list[int]
    partial: PartialPrefix | None

    @property
    def num_full(self) -> int:
        """Full blocks."""
        return len(self.blocks) + len(self.host_blocks)

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_full * block_size + (self.partial.tokens if self.partial else 0)

    def way_back(self, sequence: Sequence, block_size: int) -> Return:
        """How a preempted sequence comes back with this."""
        loaded = len(self.host_blocks) * block_size
        kept = self.num_tokens(block_size) - loaded
        computed = sequence.num_known - kept - loaded
        if loaded >= max(kept, computed):
            return Return.SWAPPED
        return Return.KEPT if kept >= computed else Return.RECOMPUTED


_NOTHING_CACHED = CachedPrefix([], [], None)


class PrefixSharing:
    """Shared, copied and kept blocks of one worker's pool."""

    __slots__ = ("_copied", "_copies_of", "_kept", "_limits", "_matched", "_partials", "_pool")

    def __init__(self, limits: WorkerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        # The latest question to the prefix cache, and its answer.
        self._matched: tuple[tuple[int, int, int], tuple[list[int], list[int]]] = (
            (-1, -1, -1),
            ([], []),
        )
        self._partials = PartialBlocks()
        # By block from whose tokens nobody has sampled yet: who began with a copy of it.
        self._copies_of: dict[int, list[Sequence]] = {}
        # By slot, blocks to be copied: held until the step that copies them is planned.
        self._copied: dict[int, int] = {}
        # By arrival, blocks of ended sequences that others will go on from.
        self._kept: dict[int, list[int]] = {}

    # Finding

    def find(self, sequence: Sequence) -> CachedPrefix:
        """What is cached of the sequence's first tokens; one token is always computed."""
        if not self._limits.prefix_caching:
            return _NOTHING_CACHED
        blocks, host_blocks = self._cached_blocks(sequence)
        if host_blocks:
            return CachedPrefix(blocks, host_blocks, None)  # what may be copied follows on blocks
        begin = len(blocks) * self._limits.block_size
        end = min(sequence.num_known, begin + self._limits.block_size) - 1
        rest = sequence.known_bytes(end, begin)
        partial = self._partials.find(blocks, rest, sequence.cache_salt)
        return CachedPrefix(blocks, [], partial)

    def is_being_computed(
        self, sequence: Sequence, cached: int, prefilling: Iterable[int], table: SlotTable
    ) -> bool:
        """Whether one of the slots `prefilling` will compute the block after the first `cached`.

        Steps run in order, so a block can be shared from the plan on in which it is computed, and
        this ends with that plan: soon, because every plan goes on with the prefills in their
        order, and nothing is admitted anyway while a whole step's budget of them is left.
        """
        size = self._limits.block_size
        if not self._limits.prefix_caching or self._shareable(sequence) <= cached:
            return False
        begin, end = cached * size, (cached + 1) * size
        block = sequence.known_bytes(end, begin)
        for slot in prefilling:
            other = table.sequence(slot)
            if (
                other.num_known >= end > table.computed[slot]
                and other.cache_salt == sequence.cache_salt
                and other.known_bytes(end, begin) == block
                and other.known_bytes(begin) == sequence.known_bytes(begin)
            ):
                return True
        return False

    # Sharing

    def cache(self, sequence: Sequence, num_tokens: int, *, proven: bool) -> None:
        """Caches the full blocks of the sequence's first `num_tokens`, of which the KV is answered
        for if `proven`, otherwise computed by the steps planned so far."""
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
        """The sequence, in its slot, begins with a copy of a block that another one holds."""
        self._pool.acquire([block])
        self._copied[sequence.slot] = block
        if block in self._copies_of:
            self._copies_of[block].append(sequence)

    def drop_copy(self, slot: int) -> None:
        """Lets go of the block that the slot's sequence copies.

        A step that copies it runs before any step that could write to it for another sequence.
        """
        block = self._copied.pop(slot, None)
        if block is not None:
            self._pool.release([block])

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence leaves: its last block cannot be copied any more."""
        self._partials.remove(sequence.arrival)

    def released(self, blocks: list[int]) -> None:
        """Nobody writes to these blocks any more."""
        for block in blocks if self._copies_of else ():
            self._copies_of.pop(block, None)

    # Soundness

    def prove(self, sequence: Sequence) -> None:
        """The last known token of a sequence was answered for, and sampled from."""
        self._pool.prove(sequence.blocks)
        self._copies_of.pop(sequence.blocks[self._shareable(sequence)], None)

    def drop_unproven(
        self,
        blocks: list[int],
        running: Callable[[], Iterable[Sequence]],
        preempt: Callable[[Sequence, bool], None],
    ) -> None:
        """Drops the unproven end of what a failed sequence shared; who shares it runs again.

        So does who has copied from it, and from them in turn. `preempt` takes a sequence and
        whether what it has computed is sound; it does nothing to one that runs no more.
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
            self._pool.acquire(sequence.blocks)
            self._kept[sequence.arrival] = sequence.blocks
            self.offer_copies(sequence, sequence.num_answered, proven=True)

    def forget(self, arrival: int) -> None:
        """Lets go of what was kept of an ended sequence, if there is anything."""
        blocks = self._kept.pop(arrival, None)
        if blocks is not None:
            self._partials.remove(arrival)
            self._pool.release(blocks)

    def forget_all(self) -> None:
        """Lets go of everything that was kept."""
        for arrival in list(self._kept):
            self.forget(arrival)

    # Invariants

    def held(self) -> list[int]:
        """The blocks held here, one as often as it is held."""
        return [block for blocks in self._kept.values() for block in blocks] + [
            *self._copied.values()
        ]

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts the invariants."""
        kept = {block for blocks in self._kept.values() for block in blocks}
        self._partials.check(kept.union(*(sequence.blocks for sequence in running)))

    def _cached_blocks(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Full blocks to share, and those of the host that are better loaded than computed."""
        # The head of the queue asks at every step while it waits, and once more when admitted.
        question = (sequence.arrival, sequence.num_known, self._pool.version)
        if self._matched[0] != question:
            size = self._limits.block_size
            known = sequence.known_bytes(self._shareable(sequence) * size)
            found = self._pool.match(known, sequence.cache_salt)
            here = self._pool.num_on_device(found)
            blocks, host_blocks = found[:here], found[here:]
            if host_blocks and not self._limits.host.load_pays(
                len(host_blocks), here * size, len(found) * size
            ):
                host_blocks = []
            self._matched = (question, (blocks, host_blocks))
        return self._matched[1]

    @property
    def _block_bytes(self) -> int:
        return 4 * self._limits.block_size

    def _shareable(self, sequence: Sequence) -> int:
        """Full blocks that the sequence could share: one token is always computed."""
        return (sequence.num_known - 1) // self._limits.block_size
