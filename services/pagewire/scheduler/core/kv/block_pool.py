"""The KV blocks of one worker: which are free, which are held, which are cached for reuse.

A full block can be cached: it is then found by the tokens that it holds and those before them (see
`PrefixTree`). A cached block without a holder is idle: it keeps its contents until its space is
needed. Its contents are saved in host memory first, if there is any and saving pays (see
`HostTier`).
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.evictor import Evictor
from pagewire.scheduler.core.kv.host_tier import (
    NO_HOST_MEMORY,
    HostCopies,
    HostMemory,
    HostTier,
)
from pagewire.scheduler.core.kv.prefix_outline import NodeOutline, outline
from pagewire.scheduler.core.kv.prefix_tree import PrefixTree
from pagewire.scheduler.core.kv.windowed_tree import WindowedTree

SCRATCH_BLOCK = 0
_TOKEN_BYTES = 4


class OutOfBlocksError(Exception):
    """More blocks were requested than are available."""


class BlockState(IntEnum):
    """What a block is used for."""

    FREE = 0
    CACHED = 1  # without a holder
    HELD = 2  # by one holder
    SHARED = 3  # by several


class BlockPool:
    """Hands out block numbers 1 to num_blocks - 1; block 0 is the worker's scratch block.

    Numbers from num_blocks on are blocks in host memory, which only `match` returns.

    Lists of blocks are in the order of a sequence, from its beginning. Invariants:
    - every block but the scratch block is free, held or idle: `free + used + idle == total`;
    - a holder of a block holds the blocks before it too, so all blocks below an idle one are idle.
      With a window a holder may have given up blocks before it. Then any idle block can be evicted.
    """

    __slots__ = (
        "_evictor",
        "_free",
        "_references",
        "_tree",
        "block_size",
        "host",
        "idle",
        "loading",
        "total",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        memory: HostMemory = NO_HOST_MEMORY,
        reach: int | None = None,
    ) -> None:
        """`num_blocks` includes the scratch block; ValueError if it is less than 2.

        `reach`: blocks before its own that a token sees; None for all. Not with host memory.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; give at least 2, the scratch block and one more"
            )
        self.total = num_blocks - 1
        self.block_size = block_size
        self.idle = 0
        # Taken from the end: low numbers first, and the block released last is used first, while
        # it may still be in a cache of the device.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        # Lists of blocks that are held until the step that loads their last ones is planned.
        self.loading: list[list[int]] = []
        self.host = HostTier(num_blocks, memory)
        self._references = np.zeros(num_blocks + memory.num_blocks, dtype=np.int32)
        size = block_size * _TOKEN_BYTES
        self._tree: PrefixTree | WindowedTree
        self._evictor: Evictor | WindowedTree
        if reach is None:
            self._tree = PrefixTree(self._references, size, self.host)
            self._evictor = Evictor(self._tree, self.host, block_size)
        elif memory.num_blocks:
            raise ValueError(f"{memory.num_blocks} blocks in host memory beside a window")
        else:
            self._tree = self._evictor = WindowedTree(self._references, size, reach)

    @property
    def free(self) -> int:
        """Blocks without contents."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones, and idle ones, which are evicted."""
        return len(self._free) + self.idle

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return self.total - len(self._free) - self.idle

    @property
    def version(self) -> int:
        """Changes whenever `match` could find something else."""
        return self._tree.version

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, evicting idle ones, the least recently used first.

        Raises OutOfBlocksError and takes none if fewer are available.
        """
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.available} available")
        if count > len(self._free):
            evicted = self._evictor.evict(count - len(self._free))
            self.idle -= len(evicted)
            self._free += evicted
        rest = len(self._free) - count
        blocks = self._free[rest:]
        del self._free[rest:]
        blocks.reverse()
        self._references[blocks] = 1
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Holds cached blocks, as `match` found them, once more."""
        held = np.array(blocks, dtype=np.int64)
        counts = self._references[held]
        self.idle -= len(held) - int(np.count_nonzero(counts))
        self._references[held] = counts + 1
        self._tree.use.awaited[held] = False
        if isinstance(self._tree, WindowedTree):
            self._tree.acquire(held)

    def expect(self, blocks: Sequence[int]) -> None:
        """Marks the cached ones of `blocks`: a preempted sequence will look for them again."""
        awaited = np.array(blocks, dtype=np.int64)
        self._tree.use.awaited[awaited] = self._tree.cached(awaited)

    def bring(self, before: list[int], host_blocks: list[int], more: int) -> list[int]:
        """Takes a block for each of `host_blocks`, then `more` blocks.

        `match` found `before` and then `host_blocks`; the caller holds all of `before`. The next
        step copies the contents of `host_blocks` to the first blocks taken (see `take_copies`).
        Until that step is planned, those and `before` are held once more: a block must not be
        saved before it was loaded.
        """
        if not host_blocks:
            return self.allocate(more)
        leaving = np.array(host_blocks, dtype=np.int64)
        self._references[leaving] = 1  # so that evictions below do not drop them
        assert isinstance(self._tree, PrefixTree), "there is no host memory beside a window"
        blocks = self.allocate(len(leaving) + more)
        loaded = blocks[: len(leaving)]
        self._tree.load(leaving, np.array(loaded, dtype=np.int64))
        self._references[leaving] = 0
        self.host.load(host_blocks, loaded)
        self.loading.append(before + loaded)
        self.acquire(self.loading[-1])
        return blocks

    def take_copies(self) -> HostCopies | None:
        """The copies between device and host that the step being planned makes."""
        loading, self.loading = self.loading, []
        for blocks in loading:
            self.release(blocks)
        return self.host.take()

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each of a sequence's blocks; ValueError if one has none."""
        held = np.array(blocks, dtype=np.int64)
        counts = self._references[held] - 1
        if (counts < 0).any():
            raise ValueError(f"block {held[counts < 0][0]} is released but not held")
        self._references[held] = counts
        left = held[counts == 0]
        cached = self._tree.cached(left)
        self._free += left[~cached][::-1].tolist()
        idle = left[cached]
        if len(idle):
            self.idle += len(idle)
            self._tree.release(idle)

    def match(self, data: bytes, salt: Hashable = "") -> list[int]:
        """The blocks of the longest cached prefix of `data`, whole blocks only.

        Blocks of the device come first, then blocks in host memory. With a window, 0 stands for
        each block that the next token does not see. `data` are token ids as little-endian int32.
        Only blocks that were cached with an equal `salt` are found.
        """
        return self._tree.match(data, salt)

    def num_on_device(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, as `match` found them, are on the device: the first ones."""
        return bisect_left(blocks, True, key=lambda block: block > self.total)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are idle."""
        return len(blocks) - int(np.count_nonzero(self._references[blocks])) if blocks else 0

    def cache(
        self, blocks: Sequence[int], data: bytes, salt: Hashable = "", *, proven: bool = True
    ) -> None:
        """Caches held full blocks by their tokens `data`, in the order of a sequence.

        Stops at tokens that another block holds already. `proven`: their KV is known to be sound;
        otherwise it may not be computed yet (see `prove` and `drop_unproven`).
        """
        self._tree.insert(np.array(blocks, dtype=np.int64), data, salt, proven)

    def prove(self, blocks: Sequence[int]) -> None:
        """Notes that a token was sampled from these blocks, so their KV is sound."""
        self._tree.prove(np.array(blocks, dtype=np.int64))

    def drop_unproven(self, blocks: Sequence[int]) -> set[int]:
        """Drops from the cache all that follows the first unproven block of a failed sequence.

        Returns the dropped blocks; other sequences may hold some of them.
        """
        dropped = self._tree.cut_unproven(np.array(blocks, dtype=np.int64))
        freed = dropped[self._references[dropped] == 0].tolist()
        self.idle -= len(freed)
        self._free += freed
        return set(dropped.tolist())

    def note_hits(self, blocks: Sequence[int]) -> None:
        """Counts the start of a sequence with these cached blocks."""
        self._tree.use.hits[blocks] += 1

    def states(self) -> NDArray[np.uint8]:
        """The state of each block on the device but the scratch block: see `BlockState`."""
        return self._states(SCRATCH_BLOCK + 1, self.total + 1)

    def host_states(self) -> NDArray[np.uint8]:
        """The state of each block in host memory, which is free or cached."""
        return self._states(self.host.first, len(self._references))

    def _states(self, begin: int, end: int) -> NDArray[np.uint8]:
        references = self._references[begin:end]
        cached = self._tree.cached(np.arange(begin, end))
        held = np.minimum(references, 2) + BlockState.CACHED
        return np.where(references > 0, held, cached).astype(np.uint8)

    def outline(self, max_nodes: int) -> list[NodeOutline]:
        """The upper part of the prefix tree."""
        if isinstance(self._tree, WindowedTree):
            return self._tree.outline(max_nodes)
        return outline(self._tree, self._references, max_nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes of the prefix tree."""
        return self._tree.num_nodes

    def check(self) -> None:
        """Asserts the invariants."""
        free = np.zeros(self.total + 1, dtype=bool)
        free[self._free] = True
        assert int(free.sum()) == len(self._free), "a block is free twice"
        assert not free[SCRATCH_BLOCK], "the scratch block is free"
        assert self._references[SCRATCH_BLOCK] == 0, "the scratch block is held"
        assert (self._references >= 0).all(), "a reference count is negative"
        held = self._references[: self.total + 1] > 0
        cached = self._tree.cached(np.arange(self.total + 1, dtype=np.int64))
        assert not (free & (held | cached)).any(), "a free block is held or cached"
        assert (free | held | cached)[1:].all(), "a block is lost"
        assert not cached[SCRATCH_BLOCK], "the scratch block is cached"
        assert int((cached & ~held).sum()) == self.idle, "the count of idle blocks is wrong"
        self._tree.check()

    def references(self, block: int) -> int:
        """How often a block is held."""
        return int(self._references[block])
