"""The last blocks of sequences, found by their tokens, for others to copy.

A full block never changes, so the prefix cache shares the block itself. A block that is not full
belongs to one sequence, which writes to it behind the tokens that it has. Those tokens never
change, so they can be copied while the sequence holds the block.
"""

from typing import NamedTuple

from pagewire.scheduler.core.kv.block_pool import SCRATCH_BLOCK

_TOKEN_BYTES = 4

# The salt, the full block before it (SCRATCH_BLOCK for none), and its first tokens as bytes.
PartialKey = tuple[str, int, bytes]


class PartialPrefix(NamedTuple):
    """A block, and how many of its first tokens the text begins with."""

    block: int
    tokens: int


class PartialBlocks:
    """At most one block of each owner, a sequence.

    Invariant: the owner holds the block and all blocks before it.
    """

    __slots__ = ("_index", "_keys")

    def __init__(self) -> None:
        self._index: dict[PartialKey, int] = {}
        self._keys: dict[int, PartialKey] = {}

    def add(
        self, owner: int, blocks: list[int], data: bytes, block_bytes: int, salt: str
    ) -> int | None:
        """Offers the block with the end of `data` for copies, and returns it.

        Returns None if that block is full, if another block with the same tokens is offered, or if
        the owner has given up the block before it.
        `data` are the owner's first tokens as little-endian int32, `blocks` the blocks that hold
        them and perhaps more. Replaces the block that the owner offered before.
        """
        self.remove(owner)
        full = len(data) // block_bytes
        rest = data[full * block_bytes :]
        key = (salt, blocks[full - 1] if full else SCRATCH_BLOCK, rest)
        if not rest or key in self._index or (full and blocks[full - 1] == SCRATCH_BLOCK):
            return None
        self._index[key] = blocks[full]
        self._keys[owner] = key
        return blocks[full]

    def remove(self, owner: int) -> None:
        """Withdraws the owner's block; call it before the owner releases its blocks."""
        key = self._keys.pop(owner, None)
        if key is not None:
            del self._index[key]

    def find(self, before: list[int], rest: bytes, salt: str) -> PartialPrefix | None:
        """The offered block behind the full blocks `before` with the most tokens of `rest`.

        None also if the last of `before` is 0: it was given up.
        """
        if before and before[-1] == SCRATCH_BLOCK:
            return None
        last = before[-1] if before else SCRATCH_BLOCK
        for size in range(len(rest), 0, -_TOKEN_BYTES):
            block = self._index.get((salt, last, rest[:size]))
            if block is not None:
                return PartialPrefix(block, size // _TOKEN_BYTES)
        return None

    def check(self, held: set[int]) -> None:
        """Asserts the invariant; `held` are all blocks that sequences hold."""
        assert len(self._keys) == len(self._index), "an entry has no owner, or an owner two"
        for (_, before, _), block in self._index.items():
            assert block in held, "a block without a holder is offered"
            assert before in held or before == SCRATCH_BLOCK, "the block before it is not held"
