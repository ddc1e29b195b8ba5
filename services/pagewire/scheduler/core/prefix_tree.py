"""The radix tree over cached blocks: which block holds the KV of which beginning of a text.

An edge is a run of full blocks, so a prompt that nobody shares is one node however long it is.
Children are found by the tokens of their first block, and the rest of a run is compared token by
token, never by a hash alone. A run is split where two texts part.

Texts of different salts share nothing: each salt has a tree of its own. Whatever else the KV of a
text depends on, such as an adapter, joins the salt as a tuple.

Invariants along every path from a root: how often a block is held, when it was last used and
whether it is proven never grow from a block to the next. So the idle blocks of a path are its
end, and evicting from the ends of the leaves can free every idle block.
"""

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BlockArray = NDArray[np.int64]

NO_BLOCKS: BlockArray = np.zeros(0, dtype=np.int64)
_NO_NODE = 0


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks [n]; `data` begins with their tokens as bytes. A root's run is empty."""

    number: int
    blocks: BlockArray
    data: bytes
    parent: "_Node | None"
    salt: Hashable = None  # of a root
    children: dict[bytes, "_Node"] = field(default_factory=dict)


class PrefixTree:
    """Where cached blocks hang, and which of them to give up first.

    `references` counts the holders of each block; the tree reads it and never writes it.
    """

    __slots__ = (
        "_block_bytes",
        "_clock",
        "_leaves",
        "_node_of",
        "_nodes",
        "_numbers",
        "_references",
        "_roots",
        "_unproven",
        "_used_at",
        "version",
    )

    def __init__(self, references: NDArray[np.int32], block_bytes: int) -> None:
        """`block_bytes` of token ids fill a block."""
        # Grows whenever `match` could find something else.
        self.version = 0
        self._references = references
        self._block_bytes = block_bytes
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._numbers = _NO_NODE
        self._node_of = np.zeros(len(references), dtype=np.int64)
        self._unproven = np.zeros(len(references), dtype=bool)
        self._used_at = np.zeros(len(references), dtype=np.int64)
        # Nodes that may be leaves with an idle end, by the last use of that end. An entry is
        # stale if the end has been used, or anything has changed, since.
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0

    def match(self, data: bytes, salt: Hashable) -> list[int]:
        """The blocks that hold the longest prefix of `data`, whole blocks only."""
        blocks: list[int] = []
        node = self._roots.get(salt)
        size, at = self._block_bytes, 0
        while node is not None:
            node = node.children.get(data[at : at + size])
            if node is None:
                break
            common = self._common(node, data, at)
            blocks += node.blocks[:common].tolist()
            if common < len(node.blocks):
                break
            at += common * size
        return blocks

    def insert(self, blocks: BlockArray, data: bytes, salt: Hashable, proven: bool) -> None:
        """Makes held blocks findable by their tokens `data`, in the order of a text.

        Ends early at tokens that another block holds already: what follows would hang below a
        block that the holder of `blocks` does not hold.
        """
        if not len(blocks):
            return
        size, at = self._block_bytes, 0
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(_NO_NODE, NO_BLOCKS, b"", None, salt)
        while at < len(blocks):
            child = node.children.get(data[at * size : (at + 1) * size])
            if child is None:
                self._hang(node, blocks[at:], data[at * size : len(blocks) * size], proven)
                return
            common = min(self._common(child, data, at * size), len(blocks) - at)
            if (child.blocks[:common] != blocks[at : at + common]).any():
                return
            at += common
            if at < len(blocks) and common < len(child.blocks):
                child = self._split(child, common)
            node = child

    def cached(self, blocks: BlockArray) -> NDArray[np.bool_]:
        """Which of `blocks` are in the tree."""
        found: NDArray[np.bool_] = self._node_of[blocks] != _NO_NODE
        return found

    def rest(self, blocks: BlockArray) -> None:
        """Cached blocks of one text have become idle."""
        self._clock += 1
        self._used_at[blocks] = self._clock
        for number in set(self._node_of[blocks].tolist()):
            self._offer(self._nodes[number])

    def evict(self, count: int) -> list[int]:
        """Drops `count` idle blocks, the least recently used first; so many must be idle."""
        evicted: list[int] = []
        while len(evicted) < count:
            entry = heapq.heappop(self._leaves)
            if self._is_idle_leaf(entry):
                evicted += self._shorten(self._nodes[entry[1]], count - len(evicted))
        self.version += 1
        return evicted

    def prove(self, blocks: BlockArray) -> None:
        """A token was sampled from these blocks, the beginning of a text: their KV is sound."""
        self._unproven[blocks] = False

    def cut_unproven(self, blocks: BlockArray) -> BlockArray:
        """Drops what is cached from the first unproven of a text's blocks on; returns all of it."""
        unproven = np.flatnonzero(self._unproven[blocks])
        if not len(unproven):
            return NO_BLOCKS
        node = self._nodes[int(self._node_of[blocks[unproven[0]]])]
        keep = int(np.flatnonzero(self._unproven[node.blocks])[0])
        below = [n for child in node.children.values() for n in _subtree(child)]
        dropped = np.concatenate([node.blocks[keep:], *(n.blocks for n in below)])
        for gone in below:
            del self._nodes[gone.number]
        node.children.clear()
        self._trim(node, keep)
        self._forget(dropped)
        self.version += 1
        return dropped

    def check(self) -> None:
        """Asserts the invariants; the cost is one of nodes."""
        seen = np.zeros(len(self._references), dtype=bool)
        numbers = set()
        offered = set(self._leaves)
        for root in self._roots.values():
            assert root.children, "an empty tree is kept"
            for node in (n for child in root.children.values() for n in _subtree(child)):
                numbers.add(node.number)
                assert node.parent is not None
                assert node.parent.children[node.data[: self._block_bytes]] is node, "a lost child"
                assert len(node.blocks) > 0, "an empty run"
                assert len(node.data) >= len(node.blocks) * self._block_bytes, "tokens are missing"
                assert not seen[node.blocks].any(), "a block is cached twice"
                seen[node.blocks] = True
                assert (self._node_of[node.blocks] == node.number).all(), "a wrong node"
                path = np.concatenate([node.parent.blocks[-1:], node.blocks])
                assert (np.diff(self._references[path]) <= 0).all(), "held below idle"
                assert (np.diff(self._unproven[path].astype(int)) >= 0).all(), "proven below not"
                end = int(node.blocks[-1])
                if not node.children and not self._references[end]:
                    entry = (int(self._used_at[end]), node.number)
                    assert entry in offered, "an idle leaf would never be evicted"
        assert numbers == self._nodes.keys(), "a node is lost"
        assert (seen == (self._node_of != _NO_NODE)).all(), "a block of no node"
        assert not (self._unproven & ~seen).any(), "unproven and not cached"

    def _common(self, node: _Node, data: bytes, at: int) -> int:
        """How many of a node's blocks hold the tokens of `data` from byte `at` on."""
        if data.startswith(node.data, at):
            return len(node.blocks)
        size = min(len(node.blocks), (len(data) - at) // self._block_bytes) * self._block_bytes
        mine = np.frombuffer(node.data, dtype=np.uint8, count=size)
        differs = mine != np.frombuffer(data, dtype=np.uint8, count=size, offset=at)
        first = int(differs.argmax())
        return (first if differs[first : first + 1].any() else size) // self._block_bytes

    def _hang(self, node: _Node, blocks: BlockArray, data: bytes, proven: bool) -> None:
        """Adds blocks below the end of a node: to its run if it is a leaf."""
        if node.parent is not None and not node.children:
            node.data = node.data[: len(node.blocks) * self._block_bytes] + data
            node.blocks = np.concatenate([node.blocks, blocks])
        else:
            node = self._add(node, blocks, data)
        self._node_of[blocks] = node.number
        self._unproven[blocks] = not proven
        self.version += 1

    def _add(self, parent: _Node, blocks: BlockArray, data: bytes) -> _Node:
        """A new child; the caller says whose blocks they are now."""
        self._numbers += 1
        node = _Node(self._numbers, blocks, data, parent)
        self._nodes[node.number] = parent.children[data[: self._block_bytes]] = node
        return node

    def _split(self, node: _Node, keep: int) -> _Node:
        """Gives the first `keep` blocks of a node to a new one above it; returns the new one."""
        assert node.parent is not None
        size = keep * self._block_bytes
        above = self._add(node.parent, node.blocks[:keep].copy(), node.data[:size])
        self._node_of[above.blocks] = above.number
        node.blocks, node.data = node.blocks[keep:].copy(), node.data[size:]
        node.parent = above
        above.children[node.data[: self._block_bytes]] = node
        return above

    def _offer(self, node: _Node) -> None:
        """Notes a node for eviction if it is a leaf with an idle end."""
        if node.parent is None or node.children or self._references[node.blocks[-1]]:
            return
        heapq.heappush(self._leaves, (int(self._used_at[node.blocks[-1]]), node.number))
        if len(self._leaves) > 2 * len(self._nodes) + 16:
            self._leaves = [entry for entry in set(self._leaves) if self._is_idle_leaf(entry)]
            heapq.heapify(self._leaves)

    def _is_idle_leaf(self, entry: tuple[int, int]) -> bool:
        used_at, number = entry
        node = self._nodes.get(number)
        if node is None or node.children:
            return False
        end = node.blocks[-1]
        return bool(self._references[end] == 0 and self._used_at[end] == used_at)

    def _shorten(self, leaf: _Node, most: int) -> list[int]:
        """Drops the end of an idle leaf: at most `most` blocks, and only what was used last with
        the very end, because what was used later may not be the next to go."""
        end = leaf.blocks[-most:]
        alike = (self._references[end] == 0) & (self._used_at[end] == self._used_at[end[-1]])
        keep = len(leaf.blocks) - int(alike.sum())
        dropped = leaf.blocks[keep:]
        self._forget(dropped)
        self._trim(leaf, keep)
        blocks: list[int] = dropped.tolist()
        return blocks

    def _forget(self, blocks: BlockArray) -> None:
        self._node_of[blocks] = _NO_NODE
        self._unproven[blocks] = False

    def _trim(self, node: _Node, keep: int) -> None:
        """Leaves a node without children its first `keep` blocks; without any it goes."""
        if keep:
            node.blocks = node.blocks[:keep]
            # Not at every block: copying a long run for each would cost more than it frees.
            if len(node.data) > 2 * keep * self._block_bytes:
                node.blocks = node.blocks.copy()
                node.data = node.data[: keep * self._block_bytes]
            self._offer(node)
            return
        parent = node.parent
        assert parent is not None
        del self._nodes[node.number]
        del parent.children[node.data[: self._block_bytes]]
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.salt]


def _subtree(node: _Node) -> Iterator[_Node]:
    """A node and all below it."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children.values()
