"""The KV blocks of one worker: which are free, which are held, which are cached for reuse.

A full block can be cached: it is then found again by the tokens it holds and the block before it,
so the cached blocks form a prefix tree whose edges are blocks. The index compares whole token
strings, never hashes alone. A cached block that nobody holds is idle: it keeps its contents until
its room is needed.
"""

import heapq
from array import array
from collections.abc import Sequence

SCRATCH_BLOCK = 0

# The block before it (SCRATCH_BLOCK for none) and its tokens as bytes.
BlockKey = tuple[int, bytes]


class OutOfBlocksError(Exception):
    """More blocks were asked for than are available."""


class BlockPool:
    """Hands out block numbers 1 to num_blocks - 1; block 0 is the worker's scratch block.

    Invariants: every block but the scratch block is free, held or idle: `free + used + idle ==
    total`. Who holds a block holds the blocks before it too, so below an idle block all are idle,
    and evicting from the leaves can free every idle block.
    """

    __slots__ = (
        "_children",
        "_clock",
        "_free",
        "_index",
        "_keys",
        "_leaves",
        "_references",
        "_used_at",
        "idle",
        "total",
        "version",
    )

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the scratch block; at least one more is needed."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the scratch block and one more needed")
        self.total = num_blocks - 1
        self.idle = 0
        # Grows whenever `match` could find something else.
        self.version = 0
        # Popped from the end: low numbers first, and a block just released is used again first,
        # while it may still be in a cache.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._references = array("i", bytes(4 * num_blocks))
        self._children = array("i", bytes(4 * num_blocks))
        self._used_at = array("q", bytes(8 * num_blocks))
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        # Idle leaves by their last use; an entry is stale if its block has been used since.
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones, and idle ones in exchange for their contents."""
        return len(self._free) + self.idle

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return self.total - len(self._free) - self.idle

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, evicting idle ones, the least recently used first.

        Raises OutOfBlocksError and takes none if fewer are available.
        """
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.available} available")
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Holds cached blocks, as `match` found them, once more."""
        for block in blocks:
            if self._references[block] == 0:
                self.idle -= 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one hold of each of a sequence's blocks; ValueError if one is not held."""
        self._clock += 1
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._let_go(block)

    def match(self, data: bytes, block_bytes: int) -> list[int]:
        """The cached blocks that hold the longest prefix of `data`, whole blocks only.

        `data` are token ids as bytes, `block_bytes` of them a block.
        """
        blocks: list[int] = []
        before = SCRATCH_BLOCK
        for at in range(0, len(data) - block_bytes + 1, block_bytes):
            found = self._index.get((before, data[at : at + block_bytes]))
            if found is None:
                break
            blocks.append(found)
            before = found
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are idle."""
        return sum(self._references[block] == 0 for block in blocks)

    def cache(self, blocks: Sequence[int], data: bytes, block_bytes: int) -> None:
        """Makes held full blocks findable by their tokens `data`, in the order of a sequence.

        Ends early at tokens that another block holds already: what follows would hang below a
        block that the sequence does not hold.
        """
        before = SCRATCH_BLOCK
        for block, at in zip(blocks, range(0, len(data), block_bytes), strict=True):
            key = (before, data[at : at + block_bytes])
            found = self._index.setdefault(key, block)
            if found != block:
                return
            if self._keys[block] is None:
                self.version += 1
                self._keys[block] = key
                self._children[before] += 1
            before = block

    def check(self) -> None:
        """Asserts the invariants."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert SCRATCH_BLOCK not in free, "the scratch block is free"
        assert self._references[SCRATCH_BLOCK] == 0, "the scratch block is held"
        idle = 0
        for block in range(1, self.total + 1):
            key, held = self._keys[block], self._references[block]
            assert held >= 0, "a block is held less than not at all"
            assert not (block in free and (held or key)), "a free block is held or cached"
            assert block in free or held or key, "a block is lost"
            idle += block not in free and held == 0
            if key is not None:
                assert self._index[key] == block, "the index names another block"
                before = key[0]
                assert before == SCRATCH_BLOCK or self._keys[before] is not None, "an orphan"
                assert not (held and before and not self._references[before]), "held below idle"
        assert idle == self.idle, "the count of idle blocks is wrong"
        assert len(self._index) == sum(key is not None for key in self._keys)
        children = [key[0] for key in self._keys if key is not None]
        assert all(self._children[b] == children.count(b) for b in {*children, SCRATCH_BLOCK})

    def references(self, block: int) -> int:
        """How often a block is held."""
        return self._references[block]

    def _let_go(self, block: int) -> None:
        """A block that nobody holds any more becomes idle or free."""
        if self._keys[block] is None:
            self._free.append(block)
            return
        self.idle += 1
        self._used_at[block] = self._clock
        if self._children[block] == 0:
            self._push_leaf(block)

    def _push_leaf(self, block: int) -> None:
        heapq.heappush(self._leaves, (self._used_at[block], block))
        if len(self._leaves) > 2 * self.total + 16:
            self._leaves = [entry for entry in set(self._leaves) if self._is_idle_leaf(entry)]
            heapq.heapify(self._leaves)

    def _is_idle_leaf(self, entry: tuple[int, int]) -> bool:
        used_at, block = entry
        return (
            self._keys[block] is not None
            and self._references[block] == 0
            and self._children[block] == 0
            and self._used_at[block] == used_at
        )

    def _evict(self) -> None:
        """Frees the idle leaf that was used least recently."""
        while True:
            entry = heapq.heappop(self._leaves)
            if self._is_idle_leaf(entry):
                break
        block = entry[1]
        key = self._keys[block]
        assert key is not None
        self.version += 1
        del self._index[key]
        self._keys[block] = None
        self.idle -= 1
        self._free.append(block)
        before = key[0]
        self._children[before] -= 1
        if before != SCRATCH_BLOCK and not self._children[before] and not self._references[before]:
            self._push_leaf(before)
