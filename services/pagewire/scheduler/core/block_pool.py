"""The KV blocks of one worker: which are free, which are held."""

from collections.abc import Sequence

SCRATCH_BLOCK = 0


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Hands out block numbers 1 to num_blocks - 1; block 0 is the worker's scratch block.

    Invariant: every block but the scratch block is either free or held, never both, so
    `free + used == total`.
    """

    __slots__ = ("_free", "_held", "total")

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the scratch block; at least one more is needed."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the scratch block and one more needed")
        self.total = num_blocks - 1
        # Popped from the end: low numbers first, and a block just released is used again first,
        # while it may still be in a cache.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._held = bytearray(num_blocks)

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return self.total - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks; raises OutOfBlocksError and takes none if fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block in blocks:
            self._held[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back; raises ValueError for one that is not held."""
        for block in blocks:
            if not self._held[block]:
                raise ValueError(f"block {block} is released but not held")
            self._held[block] = 0
        self._free.extend(reversed(blocks))

    def check(self) -> None:
        """Asserts the invariant."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._held[block] for block in self._free), "a free block is held"
        assert sum(self._held) + len(self._free) == self.total, "a block is neither free nor held"
        assert not self._held[SCRATCH_BLOCK], "the scratch block was handed out"
