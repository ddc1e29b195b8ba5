"""The radix tree over cached blocks: which block holds the KV of which tokens.

A node is a run of full blocks, so a prompt that shares nothing is one node of any length. A node
is found by the tokens of its first block. The rest of its run is compared token by token: a hash
alone never decides. A run is split where two texts diverge.

Texts of different salts share nothing: each salt has a tree of its own. If the KV of a text depends
on more than its tokens, such as an adapter, the salt is a tuple with that too.

A block is on the device or, after its eviction, in host memory under another number (see
`HostTier`). Only proven blocks go to host memory.

Invariants along every path from a root:
- reference counts never grow from a block to the next, and neither do times of last use;
- blocks on the device come before those in host memory;
- of those on the device, the proven ones come before the others.
So the idle blocks of a path are the end of its part on the device, and evicting from such ends can
free every idle block.
"""

from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.block_use import BlockUse
from pagewire.scheduler.core.kv.host_tier import HostTier
from pagewire.scheduler.core.kv.prefix_node import NO_BLOCKS, NO_NODE, BlockArray, PrefixNode


class PrefixTree:
    """Finds cached blocks by tokens; `Evictor` decides which of them leave.

    `references` counts the holders of each block. The tree reads it and never writes it.
    """

    __slots__ = (
        "_block_bytes",
        "_host",
        "_last_number",
        "_node_of",
        "_nodes",
        "_references",
        "_roots",
        "_unproven",
        "use",
        "version",
    )

    def __init__(self, references: NDArray[np.int32], block_bytes: int, host: HostTier) -> None:
        """`block_bytes`: bytes of the token ids that fill a block."""
        # Changes whenever `match` could find something else.
        self.version = 0
        self._references = references
        self._block_bytes = block_bytes
        self._host = host
        self._roots: dict[Hashable, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}
        self._last_number = NO_NODE
        self._node_of = np.zeros(len(references), dtype=np.int64)
        self._unproven = np.zeros(len(references), dtype=bool)
        self.use = BlockUse(references, self._nodes)

    def match(self, data: bytes, salt: Hashable) -> list[int]:
        """The blocks of the longest cached prefix of `data`, whole blocks only.

        Blocks on the device come first, those in host memory last.
        """
        blocks: list[int] = []
        node = self._roots.get(salt)
        size, at = self._block_bytes, 0
        while node is not None:
            node = node.children.get(data[at : at + size])
            if node is None:
                break
            common = node.common(data, at, size)
            blocks += node.blocks[:common].tolist()
            if common < len(node.blocks):
                break
            at += common * size
        return blocks

    def insert(self, blocks: BlockArray, data: bytes, salt: Hashable, proven: bool) -> None:
        """Caches held blocks by their tokens `data`, in the order of a text.

        Stops at tokens that another block of the device holds already: the rest would be cached
        below a block that the holder of `blocks` does not hold. A block in host memory with the
        same tokens is replaced.
        """
        if not len(blocks):
            return
        size, at = self._block_bytes, 0
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode(NO_NODE, NO_BLOCKS, b"", None, salt=salt)
        while at < len(blocks):
            child = node.children.get(data[at * size : (at + 1) * size])
            if child is None:
                self._append(node, blocks[at:], data[at * size : len(blocks) * size], proven)
                return
            common = min(child.common(data, at * size, size), len(blocks) - at)
            both = min(common, child.on_device)
            if (child.blocks[:both] != blocks[at : at + both]).any():
                return
            if both < common:
                replaced = self._move_to_device(child, blocks[at + both : at + common])
                self._unproven[blocks[at + both : at + common]] = not proven
                self._host.free(replaced.tolist())
                self._host.reuse.count(found=len(replaced))
            at += common
            if at < len(blocks) and common < len(child.blocks):
                child = self._split(child, common)
            node = child

    def cached(self, blocks: BlockArray) -> NDArray[np.bool_]:
        """Which of `blocks` are in the tree."""
        found: NDArray[np.bool_] = self._node_of[blocks] != NO_NODE
        return found

    def release(self, blocks: BlockArray) -> None:
        """Notes that these cached blocks of one text have become idle."""
        self.use.touch(blocks)
        for number in set(self._node_of[blocks].tolist()):
            self.use.offer(self._nodes[number])

    def prove(self, blocks: BlockArray) -> None:
        """Notes that a token was sampled from these blocks, the first of a text."""
        self._unproven[blocks] = False

    def count_unproven(self, blocks: BlockArray) -> int:
        """How many of `blocks` are cached and not proven."""
        return int(self._unproven[blocks].sum())

    def cut_unproven(self, blocks: BlockArray) -> BlockArray:
        """Drops everything cached from the first unproven block of a text on.

        Returns the dropped blocks of the device.
        """
        unproven = np.flatnonzero(self._unproven[blocks])
        if not len(unproven):
            return NO_BLOCKS
        node = self._nodes[int(self._node_of[blocks[unproven[0]]])]
        return self.cut(node, int(np.flatnonzero(self._unproven[node.blocks])[0]))

    def cut(self, node: PrefixNode, keep: int) -> BlockArray:
        """Drops everything after the first `keep` blocks of a node.

        Returns the dropped blocks of the device; those in host memory are free.
        """
        below = [n for child in node.children.values() for n in child.subtree()]
        dropped = np.concatenate([node.blocks[keep:], *(n.blocks for n in below)])
        for gone in below:
            del self._nodes[gone.number]
        node.children.clear()
        node.device_children = 0
        self._forget(dropped)
        on_host = dropped >= self._host.first
        self._host.free(dropped[on_host].tolist())
        self._trim(node, keep)
        self.version += 1
        return dropped[~on_host]

    def load(self, host_blocks: BlockArray, blocks: BlockArray) -> None:
        """Moves the first blocks of a text in host memory to `blocks` of the device."""
        at = 0
        while at < len(blocks):
            node = self._nodes[int(self._node_of[host_blocks[at]])]
            count = min(len(node.blocks) - node.on_device, len(blocks) - at)
            expected = int(self.use.awaited[host_blocks[at : at + count]].sum())
            self._host.reuse.count(found=count - expected)
            moved = self._move_to_device(node, blocks[at : at + count])
            assert (moved == host_blocks[at : at + count]).all(), "loaded out of order"
            at += count

    def move_to_host(self, node: PrefixNode, blocks: BlockArray, targets: BlockArray) -> None:
        """Moves the first of `blocks`, a node's last ones on the device, to `targets`.

        The caller must cut the other `blocks` next.
        """
        keep = node.on_device - len(blocks)
        self.use.moved(blocks[: len(targets)], targets)
        self._node_of[targets] = node.number
        self._forget(blocks)
        node.blocks[keep : keep + len(targets)] = targets
        node.on_device = keep
        if not keep:
            assert node.parent is not None
            node.parent.device_children -= 1
            self.use.offer(node.parent)
        self.version += 1

    @property
    def num_nodes(self) -> int:
        """Nodes of all texts."""
        return len(self._nodes)

    def roots(self) -> Iterator[PrefixNode]:
        """The empty node at the top of each tree, the newest tree first."""
        return iter(reversed(self._roots.values()))

    def check(self) -> None:
        """Asserts the invariants; takes time in proportion to the nodes."""
        seen = np.zeros(len(self._references), dtype=bool)
        numbers = set()
        unheld = self._references[self._host.first :]
        assert not unheld.any(), "a host block is held"
        for root in self._roots.values():
            assert root.children, "an empty tree is kept"
            for node in (n for child in root.children.values() for n in child.subtree()):
                numbers.add(node.number)
                assert not seen[node.blocks].any(), "a block is cached twice"
                seen[node.blocks] = True
                assert (self._node_of[node.blocks] == node.number).all(), "a wrong node"
                self._check_node(node)
        self.use.check()
        self._host.check(set(np.flatnonzero(seen[self._host.first :]) + self._host.first))
        assert numbers == self._nodes.keys(), "a node is lost"
        assert (seen == (self._node_of != NO_NODE)).all(), "a block of no node"
        assert not (self._unproven & ~seen).any(), "unproven and not cached"
        assert not (self.use.awaited & ~seen).any(), "awaited and not cached"

    def _check_node(self, node: PrefixNode) -> None:
        assert node.parent is not None
        assert node.parent.children[node.data[: self._block_bytes]] is node, "a lost child"
        assert len(node.blocks) > 0, "an empty run"
        assert len(node.data) >= len(node.blocks) * self._block_bytes, "tokens are missing"
        path = np.concatenate([node.parent.blocks[-1:], node.blocks])
        assert (np.diff(self._references[path]) <= 0).all(), "held below idle"
        on_host = path >= self._host.first
        assert (np.diff(on_host.astype(int)) >= 0).all(), "on the device below the host"
        assert node.on_device == int((node.blocks < self._host.first).sum())
        unproven = self._unproven[path[~on_host]]
        assert (np.diff(unproven.astype(int)) >= 0).all(), "proven below not"
        assert not self._unproven[path[on_host]].any(), "unproven on the host"
        assert node.depth == node.parent.depth + len(node.parent.blocks), "a wrong depth"
        beginning = sum(child.on_device > 0 for child in node.children.values())
        assert node.device_children == beginning, "a miscount of children"

    def _append(self, node: PrefixNode, blocks: BlockArray, data: bytes, proven: bool) -> None:
        """Adds blocks after the end of a node: to its run if it is a leaf, else as a child."""
        if node.parent is not None and not node.children:
            node.data = node.data[: len(node.blocks) * self._block_bytes] + data
            node.blocks = np.concatenate([node.blocks, blocks])
            node.on_device = len(node.blocks)
        else:
            node.device_children += 1
            node = self._add_child(node, blocks, data)
        self._node_of[blocks] = node.number
        self._unproven[blocks] = not proven
        self.version += 1

    def _add_child(self, parent: PrefixNode, blocks: BlockArray, data: bytes) -> PrefixNode:
        """A new child, all on the device; the caller sets the blocks' node."""
        self._last_number += 1
        depth = parent.depth + len(parent.blocks)
        node = PrefixNode(self._last_number, blocks, data, parent, depth, len(blocks))
        self._nodes[node.number] = parent.children[data[: self._block_bytes]] = node
        return node

    def _split(self, node: PrefixNode, keep: int) -> PrefixNode:
        """Moves the first `keep` blocks of a node, all on the device, to a new node above it.

        Returns the new node.
        """
        assert node.parent is not None
        assert keep <= node.on_device
        size = keep * self._block_bytes
        above = self._add_child(node.parent, node.blocks[:keep].copy(), node.data[:size])
        self._node_of[above.blocks] = above.number
        node.blocks, node.data = node.blocks[keep:].copy(), node.data[size:]
        node.parent, node.depth = above, node.depth + keep
        node.on_device -= keep
        above.children[node.data[: self._block_bytes]] = node
        above.device_children = int(node.on_device > 0)
        return above

    def _move_to_device(self, node: PrefixNode, blocks: BlockArray) -> BlockArray:
        """Puts `blocks` of the device in the place of a node's first ones in host memory.

        Returns the latter. The new ones are proven if the block before them is.
        """
        begin, end = node.on_device, node.on_device + len(blocks)
        assert node.parent is not None
        above = node.blocks[begin - 1 : begin] if begin else node.parent.blocks[-1:]
        if not begin:
            node.parent.device_children += 1
        before = node.blocks[begin:end].copy()
        self.use.hits[blocks] = self.use.hits[before]
        self._forget(before)
        self._unproven[blocks] = self._unproven[above].any()
        node.blocks[begin:end] = blocks
        node.on_device = end
        self._node_of[blocks] = node.number
        self.version += 1
        return before

    def _forget(self, blocks: BlockArray) -> None:
        """Clears the data about blocks that leave the tree."""
        self._node_of[blocks] = NO_NODE
        self._unproven[blocks] = False
        self.use.awaited[blocks] = False
        self.use.hits[blocks] = 0

    def _trim(self, node: PrefixNode, keep: int) -> None:
        """Shortens a node without children to its first `keep` blocks, or removes it."""
        if keep:
            node.blocks = node.blocks[:keep]
            node.on_device = min(keep, node.on_device)
            # Not every time: copying a long run at every cut would cost more than it frees.
            if len(node.data) > 2 * keep * self._block_bytes:
                node.blocks = node.blocks.copy()
                node.data = node.data[: keep * self._block_bytes]
            self.use.offer(node)
            return
        parent = node.parent
        assert parent is not None
        parent.device_children -= node.on_device > 0
        del self._nodes[node.number]
        del parent.children[node.data[: self._block_bytes]]
        if parent.parent is not None:
            self.use.offer(parent)
        elif not parent.children:
            del self._roots[parent.salt]
