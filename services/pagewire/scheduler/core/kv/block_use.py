"""When cached blocks were last used, and which ends of the prefix tree's nodes to evict next."""

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.eviction_order import EvictionOrder
from pagewire.scheduler.core.kv.prefix_node import BlockArray, PrefixNode


class BlockUse:
    """The use of cached blocks, and two eviction orders: of the device and of host memory.

    A node is in an order while its last block there is idle and no block below it is there too.
    `awaited` marks blocks of preempted sequences, which will look for them again. `hits` counts the
    sequences that started with a block while it was cached.
    """

    __slots__ = (
        "_clock",
        "_device_ends",
        "_host_ends",
        "_nodes",
        "_references",
        "_used_at",
        "awaited",
        "hits",
    )

    def __init__(self, references: NDArray[np.int32], nodes: dict[int, PrefixNode]) -> None:
        """Reads the tree's `nodes` by number and the `references` to each block; writes neither."""
        self.awaited = np.zeros(len(references), dtype=bool)
        self.hits = np.zeros(len(references), dtype=np.uint32)
        self._references = references
        self._nodes = nodes
        self._used_at = np.zeros(len(references), dtype=np.int64)
        self._clock = 0
        self._device_ends = EvictionOrder(self._device_end_used_at)
        self._host_ends = EvictionOrder(self._host_end_used_at)

    def touch(self, blocks: BlockArray) -> None:
        """Notes that these blocks were used now."""
        self._clock += 1
        self._used_at[blocks] = self._clock

    def moved(self, blocks: BlockArray, targets: BlockArray) -> None:
        """Copies the use of `blocks` to `targets`, which have their contents now."""
        self._used_at[targets] = self._used_at[blocks]
        self.awaited[targets] = self.awaited[blocks]
        self.hits[targets] = self.hits[blocks]

    def offer(self, node: PrefixNode) -> None:
        """Considers a node for eviction; call it whenever one of its ends may be idle."""
        self._device_ends.offer(node.number, len(self._nodes))
        self._host_ends.offer(node.number, len(self._nodes))

    def next_on_device(self) -> PrefixNode | None:
        """The node whose end on the device was used longest ago; None if no end is idle.

        The caller must offer the node again.
        """
        number = self._device_ends.pop()
        return None if number is None else self._nodes[number]

    def next_in_host_memory(self) -> PrefixNode | None:
        """As `next_on_device`, for host memory."""
        number = self._host_ends.pop()
        return None if number is None else self._nodes[number]

    def count_alike(self, end: BlockArray) -> int:
        """How many blocks of a run's `end` are idle and as old as its last one.

        Blocks before those were used later, and may not be the next to evict.
        """
        alike = (self._references[end] == 0) & (self._used_at[end] == self._used_at[end[-1]])
        return int(alike.sum())

    def check(self) -> None:
        """Asserts that every idle end can be found."""
        numbers = list(self._nodes)
        for ends in (self._device_ends, self._host_ends):
            assert not ends.missing(numbers), "an idle end would never be evicted"

    def _device_end_used_at(self, number: int) -> int | None:
        node = self._nodes.get(number)
        if node is None or not node.on_device or node.device_children:
            return None
        return self._idle_since(node.blocks[node.on_device - 1])

    def _host_end_used_at(self, number: int) -> int | None:
        node = self._nodes.get(number)
        if node is None or node.children or node.on_device == len(node.blocks):
            return None
        return self._idle_since(node.blocks[-1])

    def _idle_since(self, block: np.int64) -> int | None:
        return None if self._references[block] else int(self._used_at[block])
