"""Eviction: idle blocks of the device are freed, their contents saved in host memory or dropped."""

import numpy as np

from pagewire.scheduler.core.kv.host_tier import HostTier
from pagewire.scheduler.core.kv.prefix_node import BlockArray, PrefixNode
from pagewire.scheduler.core.kv.prefix_tree import PrefixTree


class Evictor:
    """Evicts from the ends of the tree's nodes, the least recently used first."""

    __slots__ = ("_block_tokens", "_host", "_tree")

    def __init__(self, tree: PrefixTree, host: HostTier, block_tokens: int) -> None:
        self._tree = tree
        self._host = host
        self._block_tokens = block_tokens

    def evict(self, count: int) -> list[int]:
        """Frees `count` blocks of the device; at least that many must be idle."""
        evicted: list[int] = []
        while len(evicted) < count:
            node = self._tree.use.next_on_device()
            assert node is not None, "fewer blocks are idle than were asked for"
            evicted += self._evict_end(node, count - len(evicted))
        return evicted

    def _evict_end(self, node: PrefixNode, limit: int) -> list[int]:
        """Frees at most `limit` blocks from the idle end of a node's part on the device."""
        count = self._tree.use.count_alike(node.blocks[: node.on_device][-limit:])
        keep = node.on_device - count
        end = node.blocks[keep : node.on_device].copy()
        proven = count - self._tree.count_unproven(end)
        if proven < count:
            self._tree.cut(node, keep + proven)
        saved = self._save(node, end[:proven]) if self._save_pays(node, keep, end[:proven]) else 0
        if saved < proven:
            self._tree.cut(node, keep + saved)
        self._tree.use.offer(node)
        evicted: list[int] = end.tolist()
        return evicted

    def _save_pays(self, node: PrefixNode, keep: int, end: BlockArray) -> bool:
        """Whether to save `end`, the blocks that follow the first `keep` of a node."""
        if not len(end):
            return False
        # Blocks in host memory below this end are of use only together with it.
        if len(node.blocks) > node.on_device or node.children:
            return True
        depth = node.depth + keep + len(end)
        awaited = bool(self._tree.use.awaited[end].any())
        return self._host.save_pays(node.number, depth, depth * self._block_tokens, awaited)

    def _save(self, node: PrefixNode, end: BlockArray) -> int:
        """Saves the first blocks of a node's `end` that have room; returns how many."""
        count = self._make_room(len(end))
        if count:
            targets = np.array(self._host.save(end[:count].tolist()), dtype=np.int64)
            self._tree.move_to_host(node, end, targets)
        return count

    def _make_room(self, wanted: int) -> int:
        """Drops the least recently used contents of host memory until `wanted` blocks are free.

        Returns how many of those wanted are free now.
        """
        while (missing := wanted - self._host.num_free) > 0:
            node = self._tree.use.next_in_host_memory()
            if node is None:
                break
            dropped = self._tree.use.count_alike(node.blocks[node.on_device :][-missing:])
            expected = int(self._tree.use.awaited[node.blocks[-dropped:]].sum())
            self._host.reuse.count(dropped=dropped - expected)
            self._tree.cut(node, len(node.blocks) - dropped)
        return min(wanted, self._host.num_free)
