"""One node of the prefix tree: a run of cached blocks and the tokens that they hold."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BlockArray = NDArray[np.int64]

NO_BLOCKS: BlockArray = np.zeros(0, dtype=np.int64)
# The number of a block's node while the block is not cached.
NO_NODE = 0


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of blocks [n]. `data` begins with their tokens as bytes, and may be longer.

    The first `on_device` blocks are on the device, the others in host memory. If any block of the
    run is in host memory, so is every block below it. The run of a root is empty.
    """

    number: int
    blocks: BlockArray
    data: bytes
    parent: "PrefixNode | None"
    depth: int = 0  # blocks before the run
    on_device: int = 0
    salt: Hashable = None  # set at a root only
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)  # by their first block
    device_children: int = 0  # children whose first block is on the device

    def common(self, data: bytes, at: int, block_bytes: int) -> int:
        """How many blocks of the run hold the tokens of `data` from byte `at` on."""
        if data.startswith(self.data, at):
            return len(self.blocks)
        size = min(len(self.blocks), (len(data) - at) // block_bytes) * block_bytes
        mine = np.frombuffer(self.data, dtype=np.uint8, count=size)
        differs = mine != np.frombuffer(data, dtype=np.uint8, count=size, offset=at)
        first = int(differs.argmax())
        return (first if differs[first : first + 1].any() else size) // block_bytes

    def subtree(self) -> Iterator["PrefixNode"]:
        """This node and all nodes below it."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()
