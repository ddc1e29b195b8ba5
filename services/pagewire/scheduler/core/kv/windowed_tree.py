"""The tree over cached blocks of a model in which every layer has a sliding window.

A text continues from cached KV if the blocks that its next token sees are cached: the last `reach`
blocks of the match. Earlier ones may be missing. So each node is one block, and any idle block can
be evicted. A node without a block stays while a block below it is cached: it has the tokens before
that block. `PrefixTree`, for other models, never has such gaps.

Blocks are compared by their tokens. There is no host memory here.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.prefix_node import NO_BLOCKS, BlockArray
from pagewire.scheduler.core.kv.prefix_outline import MAX_DEPTH, NodeOutline

NO_BLOCK = 0
# An outline visits at most this many nodes, which takes some milliseconds.
_MAX_OUTLINED = 4096


@dataclass(slots=True, eq=False)
class _Node:
    """One block of a text, or the empty beginning of all texts of a salt."""

    parent: "_Node | None"
    key: bytes  # the tokens of the block
    salt: Hashable = None  # set at a root only
    block: int = NO_BLOCK
    unproven: bool = False
    children: dict[bytes, "_Node"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WindowedUse:
    """By block: how many sequences started with it; `awaited` serves host memory only."""

    hits: NDArray[np.uint32]
    awaited: NDArray[np.bool_]


class WindowedTree:
    """Finds cached blocks by tokens, and evicts them; see `PrefixTree` for the common methods.

    Invariants: an idle block is in the order of eviction; a node without a block has children.
    """

    __slots__ = (
        "_block_bytes",
        "_cached",
        "_idle",
        "_nodes",
        "_reach",
        "_references",
        "_roots",
        "use",
        "version",
    )

    def __init__(self, references: NDArray[np.int32], block_bytes: int, reach: int) -> None:
        """`reach`: blocks before its own that a token sees."""
        # Changes whenever `match` could find something else.
        self.version = 0
        self._references = references
        self._block_bytes = block_bytes
        self._reach = reach
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by block
        self._cached = np.zeros(len(references), dtype=bool)
        # The least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.use = WindowedUse(
            np.zeros(len(references), dtype=np.uint32), np.zeros(len(references), dtype=bool)
        )

    @property
    def num_nodes(self) -> int:
        """Cached blocks."""
        return len(self._nodes)

    def match(self, data: bytes, salt: Hashable) -> list[int]:
        """The blocks of the longest prefix of `data` that a text can continue from.

        0 stands for each block behind the window of the next token.
        """
        found: list[int] = []
        best = unbroken = 0
        node = self._roots.get(salt)
        for at in range(0, len(data), self._block_bytes):
            if node is not None:
                node = node.children.get(data[at : at + self._block_bytes])
            if node is None:
                break
            found.append(node.block)
            unbroken = unbroken + 1 if node.block else 0
            if unbroken >= min(self._reach, len(found)):
                best = len(found)
        freed = max(0, best - self._reach)
        return [NO_BLOCK] * freed + found[freed:best]

    def insert(self, blocks: BlockArray, data: bytes, salt: Hashable, proven: bool) -> None:
        """Caches held blocks by their tokens; entries of 0 are behind the window.

        Stops at tokens that another block holds already.
        """
        if not len(blocks):
            return
        size = self._block_bytes
        known = np.flatnonzero(self._cached[blocks])
        begin = int(known[-1]) + 1 if len(known) else 0
        if begin:
            node = self._nodes[int(blocks[begin - 1])]
        else:
            node = self._roots.setdefault(salt, _Node(None, b"", salt))
        for place, block in enumerate(blocks[begin:].tolist(), begin):
            key = data[place * size : (place + 1) * size]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key)
            node = child
            if block and not node.block:
                node.block, node.unproven = block, not proven
                self._nodes[block] = node
                self._cached[block] = True
                self.version += 1
            elif block:
                break
        self._prune(node)

    def cached(self, blocks: BlockArray) -> NDArray[np.bool_]:
        """Which of `blocks` are in the tree."""
        found: NDArray[np.bool_] = self._cached[blocks]
        return found

    def acquire(self, blocks: BlockArray) -> None:
        """Notes that these blocks are held."""
        for block in blocks.tolist():
            self._idle.pop(block, None)

    def release(self, blocks: BlockArray) -> None:
        """Notes that these cached blocks have become idle; the last of them is evicted first."""
        self._idle.update(dict.fromkeys(blocks[::-1].tolist()))

    def evict(self, count: int) -> list[int]:
        """Frees `count` blocks, the least recently used; at least that many must be idle."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._prune(self._forget(block))
        return evicted

    def prove(self, blocks: BlockArray) -> None:
        """Notes that a token was sampled from these blocks."""
        for block in blocks.tolist():
            if self._cached[block]:
                self._nodes[block].unproven = False

    def cut_unproven(self, blocks: BlockArray) -> BlockArray:
        """Drops the unproven ones of a text's blocks, and unproven blocks that come after them.

        Returns the dropped blocks.
        """
        for block in blocks.tolist():
            if self._cached[block] and self._nodes[block].unproven:
                break
        else:
            return NO_BLOCKS
        below = [n for n in _subtree(self._nodes[block]) if n.block and n.unproven]
        dropped = [n.block for n in below]
        for node in below:
            self._forget(node.block)
        for node in reversed(below):
            self._prune(node)
        return np.array(dropped, dtype=np.int64)

    def outline(self, max_nodes: int) -> list[NodeOutline]:
        """The upper part of the tree, level by level; a node is a run up to the next branch."""
        found: list[NodeOutline] = []
        left = _MAX_OUTLINED
        level = [(-1, node) for root in self._roots.values() for node in root.children.values()]
        for _ in range(MAX_DEPTH):
            below: list[tuple[int, _Node]] = []
            for parent, node in level:
                if len(found) == max_nodes or not left:
                    return found
                run = [node]
                while len(node.children) == 1 and len(run) < left:
                    (node,) = node.children.values()
                    run.append(node)
                left -= len(run)
                blocks = [each.block for each in run if each.block]
                if blocks:
                    hits = int(self.use.hits[blocks].max())
                    holders = int(self._references[blocks].max())
                    found.append(NodeOutline(parent, len(blocks), len(blocks), hits, holders))
                    parent = len(found) - 1
                below += [(parent, child) for child in node.children.values()]
            level = below
        return found

    def check(self) -> None:
        """Asserts the invariants; takes time in proportion to the nodes."""
        seen = {}
        for salt, root in self._roots.items():
            assert root.salt == salt
            assert root.children, "an empty tree is kept"
            for node in _subtree(root):
                for key, child in node.children.items():
                    assert child.parent is node
                    assert child.key == key, "a lost child"
                if node.block:
                    assert node.block not in seen, "a block is cached twice"
                    seen[node.block] = node
                assert node.block or node.children, "a node without a use"
                assert node.block or not node.unproven, "unproven without a block"
        assert seen == self._nodes, "a node is lost"
        assert set(np.flatnonzero(self._cached)) == set(seen), "a block of no node"
        idle = {block for block in seen if not self._references[block]}
        assert idle == set(self._idle), "an idle block would never be evicted"

    def _forget(self, block: int) -> _Node:
        """Takes a block out of its node."""
        node = self._nodes.pop(block)
        node.block, node.unproven = NO_BLOCK, False
        self._cached[block] = False
        self._idle.pop(block, None)
        self.use.hits[block] = 0
        self.version += 1
        return node

    def _prune(self, node: _Node) -> None:
        """Removes a node without block and children, and then such nodes above it."""
        while not node.block and not node.children:
            if node.parent is None:
                self._roots.pop(node.salt, None)
                return
            if node.parent.children.get(node.key) is not node:  # removed before
                return
            del node.parent.children[node.key]
            node = node.parent


def _subtree(top: _Node) -> Iterator[_Node]:
    """The node and all nodes below it, each after the one above it."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children.values()
