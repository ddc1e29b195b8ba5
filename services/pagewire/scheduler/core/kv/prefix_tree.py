"""The radix tree over cached blocks: which block holds the KV of which beginning of a text.

An edge is a run of full blocks, so a prompt that nobody shares is one node however long it is.
Children are found by the tokens of their first block, and the rest of a run is compared token by
token, never by a hash alone. A run is split where two texts part.

Texts of different salts share nothing: each salt has a tree of its own. Whatever else the KV of a
text depends on, such as an adapter, joins the salt as a tuple.

A block is on the device or, once it was evicted there, in the host's memory, where it has another
number: see `HostTier`. Only what is proven goes to the host.

Invariants along every path from a root: how often a block is held and when it was last used never
grow from a block to the next; those on the device come before those on the host, and of those on
the device the proven ones before the others. So the idle blocks of a path are the end of what is
on the device, and evicting from such ends can free every idle block.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.eviction_order import EvictionOrder
from pagewire.scheduler.core.kv.host_tier import HostTier

BlockArray = NDArray[np.int64]

NO_BLOCKS: BlockArray = np.zeros(0, dtype=np.int64)
_NO_NODE = 0


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks [n]; `data` begins with their tokens as bytes. A root's run is empty.

    The first `on_device` of its blocks are on the device; if that is not all, no block below is.
    """

    number: int
    blocks: BlockArray
    data: bytes
    parent: "_Node | None"
    depth: int = 0  # blocks before the run
    on_device: int = 0
    salt: Hashable = None  # of a root
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    device_children: int = 0  # those that begin on the device


class PrefixTree:
    """Where cached blocks hang, and which of them to give up first.

    `references` counts the holders of each block; the tree reads it and never writes it.
    """

    __slots__ = (
        "_awaited",
        "_block_bytes",
        "_clock",
        "_device_ends",
        "_host",
        "_host_ends",
        "_node_of",
        "_nodes",
        "_numbers",
        "_references",
        "_roots",
        "_unproven",
        "_used_at",
        "version",
    )

    def __init__(self, references: NDArray[np.int32], block_bytes: int, host: HostTier) -> None:
        """`block_bytes` of token ids fill a block; what is evicted may go to `host`."""
        # Grows whenever `match` could find something else.
        self.version = 0
        self._references = references
        self._block_bytes = block_bytes
        self._host = host
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._numbers = _NO_NODE
        self._node_of = np.zeros(len(references), dtype=np.int64)
        self._unproven = np.zeros(len(references), dtype=bool)
        # What a request that was preempted will want again.
        self._awaited = np.zeros(len(references), dtype=bool)
        self._used_at = np.zeros(len(references), dtype=np.int64)
        # What may go next from the device, and from the host.
        self._device_ends = EvictionOrder(self._device_end_used_at)
        self._host_ends = EvictionOrder(self._host_end_used_at)
        self._clock = 0

    def match(self, data: bytes, salt: Hashable) -> list[int]:
        """The blocks that hold the longest prefix of `data`, whole blocks only; the host's last."""
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

        Ends early at tokens that another block of the device holds already: what follows would
        hang below a block that the holder of `blocks` does not hold. The place of a block of the
        host is taken.
        """
        if not len(blocks):
            return
        size, at = self._block_bytes, 0
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(_NO_NODE, NO_BLOCKS, b"", None, salt=salt)
        while at < len(blocks):
            child = node.children.get(data[at * size : (at + 1) * size])
            if child is None:
                self._hang(node, blocks[at:], data[at * size : len(blocks) * size], proven)
                return
            common = min(self._common(child, data, at * size), len(blocks) - at)
            both = min(common, child.on_device)
            if (child.blocks[:both] != blocks[at : at + both]).any():
                return
            if both < common:
                replaced = self._bring(child, blocks[at + both : at + common])
                self._unproven[blocks[at + both : at + common]] = not proven
                self._host.free(replaced.tolist())
                self._host.reuse.count(found=len(replaced))
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

    def expect(self, blocks: BlockArray) -> None:
        """A request that was preempted will want those of its blocks that are cached."""
        self._awaited[blocks] = self.cached(blocks)

    def use(self, blocks: BlockArray) -> None:
        """Cached blocks are held once more."""
        self._awaited[blocks] = False

    def evict(self, count: int) -> list[int]:
        """Takes `count` idle blocks of the device, the least recently used first; so many must be
        idle. What they hold goes to the host where that pays, or is dropped."""
        evicted: list[int] = []
        while len(evicted) < count:
            number = self._device_ends.pop()
            assert number is not None, "fewer blocks are idle than were asked for"
            evicted += self._evict_end(self._nodes[number], count - len(evicted))
        self.version += 1
        return evicted

    def load(self, host_blocks: BlockArray, blocks: BlockArray) -> None:
        """The contents of blocks on the host, the first of a text there, come to `blocks`."""
        at = 0
        while at < len(blocks):
            node = self._nodes[int(self._node_of[host_blocks[at]])]
            count = min(len(node.blocks) - node.on_device, len(blocks) - at)
            expected = int(self._awaited[host_blocks[at : at + count]].sum())
            self._host.reuse.count(found=count - expected)
            moved = self._bring(node, blocks[at : at + count])
            assert (moved == host_blocks[at : at + count]).all(), "loaded out of order"
            at += count

    def prove(self, blocks: BlockArray) -> None:
        """A token was sampled from these blocks, the beginning of a text: their KV is sound."""
        self._unproven[blocks] = False

    def cut_unproven(self, blocks: BlockArray) -> BlockArray:
        """Drops what is cached from the first unproven of a text's blocks on; returns the blocks of
        the device."""
        unproven = np.flatnonzero(self._unproven[blocks])
        if not len(unproven):
            return NO_BLOCKS
        node = self._nodes[int(self._node_of[blocks[unproven[0]]])]
        return self._cut(node, int(np.flatnonzero(self._unproven[node.blocks])[0]))

    def check(self) -> None:
        """Asserts the invariants; the cost is one of nodes."""
        seen = np.zeros(len(self._references), dtype=bool)
        numbers = set()
        unheld = self._references[self._host.first :]
        assert not unheld.any(), "a host block is held"
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
                on_host = path >= self._host.first
                assert (np.diff(on_host.astype(int)) >= 0).all(), "on the device below the host"
                assert node.on_device == int((node.blocks < self._host.first).sum())
                unproven = self._unproven[path[~on_host]]
                assert (np.diff(unproven.astype(int)) >= 0).all(), "proven below not"
                assert not self._unproven[path[on_host]].any(), "unproven on the host"
                assert node.depth == node.parent.depth + len(node.parent.blocks), "a wrong depth"
                beginning = sum(child.on_device > 0 for child in node.children.values())
                assert node.device_children == beginning, "a miscount of children"
        for ends in (self._device_ends, self._host_ends):
            assert not ends.missing(list(numbers)), "an idle end would never be evicted"
        self._host.check(set(np.flatnonzero(seen[self._host.first :]) + self._host.first))
        assert numbers == self._nodes.keys(), "a node is lost"
        assert (seen == (self._node_of != _NO_NODE)).all(), "a block of no node"
        assert not (self._unproven & ~seen).any(), "unproven and not cached"
        assert not (self._awaited & ~seen).any(), "awaited and not cached"

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
            node.on_device = len(node.blocks)
        else:
            node.device_children += 1
            node = self._add(node, blocks, data)
        self._node_of[blocks] = node.number
        self._unproven[blocks] = not proven
        self.version += 1

    def _add(self, parent: _Node, blocks: BlockArray, data: bytes) -> _Node:
        """A new child, all on the device; the caller says whose blocks they are now."""
        self._numbers += 1
        depth = parent.depth + len(parent.blocks)
        node = _Node(self._numbers, blocks, data, parent, depth, len(blocks))
        self._nodes[node.number] = parent.children[data[: self._block_bytes]] = node
        return node

    def _split(self, node: _Node, keep: int) -> _Node:
        """Gives the first `keep` blocks of a node, which are on the device, to a new one above it;
        returns the new one."""
        assert node.parent is not None
        assert keep <= node.on_device
        size = keep * self._block_bytes
        above = self._add(node.parent, node.blocks[:keep].copy(), node.data[:size])
        self._node_of[above.blocks] = above.number
        node.blocks, node.data = node.blocks[keep:].copy(), node.data[size:]
        node.parent, node.depth = above, node.depth + keep
        node.on_device -= keep
        above.children[node.data[: self._block_bytes]] = node
        above.device_children = int(node.on_device > 0)
        return above

    def _bring(self, node: _Node, blocks: BlockArray) -> BlockArray:
        """The first blocks of a node on the host are on the device now, in `blocks`; returns their
        numbers on the host. They are proven if what comes before them is."""
        begin, end = node.on_device, node.on_device + len(blocks)
        assert node.parent is not None
        above = node.blocks[begin - 1 : begin] if begin else node.parent.blocks[-1:]
        if not begin:
            node.parent.device_children += 1
        before = node.blocks[begin:end].copy()
        self._forget(before)
        self._unproven[blocks] = self._unproven[above].any()
        node.blocks[begin:end] = blocks
        node.on_device = end
        self._node_of[blocks] = node.number
        self.version += 1
        return before

    def _device_end_used_at(self, number: int) -> int | None:
        node = self._nodes.get(number)
        if node is None or not node.on_device or node.device_children:
            return None
        end = node.blocks[node.on_device - 1]
        return None if self._references[end] else int(self._used_at[end])

    def _host_end_used_at(self, number: int) -> int | None:
        node = self._nodes.get(number)
        if node is None or node.children or node.on_device == len(node.blocks):
            return None
        end = node.blocks[-1]
        return None if self._references[end] else int(self._used_at[end])

    def _offer(self, node: _Node) -> None:
        """Notes a node for eviction."""
        self._device_ends.offer(node.number, len(self._nodes))
        self._host_ends.offer(node.number, len(self._nodes))

    def _alike(self, end: BlockArray) -> int:
        """How many of the last blocks are idle and were used last with the very end: what was used
        later may not be the next to go."""
        alike = (self._references[end] == 0) & (self._used_at[end] == self._used_at[end[-1]])
        return int(alike.sum())

    def _evict_end(self, node: _Node, most: int) -> list[int]:
        """Takes at most `most` blocks of the device from the idle end of a node."""
        count = self._alike(node.blocks[: node.on_device][-most:])
        keep = node.on_device - count
        end = node.blocks[keep : node.on_device].copy()
        evicted: list[int] = end.tolist()
        proven = count - int(self._unproven[end].sum())
        if proven < count:
            self._cut(node, keep + proven)
        below = len(node.blocks) > node.on_device or bool(node.children)
        depth = node.depth + keep + proven
        tokens = depth * self._block_bytes // 4
        awaited = bool(self._awaited[end[:proven]].any())
        saved = 0
        # What is on the host below is of use only together with this.
        if proven and (below or self._host.save_pays(node.number, depth, tokens, awaited)):
            saved = self._save(node, keep, end[:proven])
        if saved < proven:
            self._cut(node, keep + saved)
        self._offer(node)
        return evicted

    def _save(self, node: _Node, keep: int, end: BlockArray) -> int:
        """Moves blocks, those of a node that follow its first `keep`, to the host; returns how many
        found room."""
        count = self._make_room(len(end))
        if not count:
            return 0
        saved = end[:count]
        targets = np.array(self._host.save(saved.tolist()), dtype=np.int64)
        self._used_at[targets] = self._used_at[saved]
        self._awaited[targets] = self._awaited[saved]
        self._node_of[targets] = node.number
        self._forget(end)
        node.blocks[keep : keep + count] = targets
        node.on_device = keep
        if not keep:
            assert node.parent is not None
            node.parent.device_children -= 1
            self._offer(node.parent)
        return count

    def _make_room(self, wanted: int) -> int:
        """Drops the least recently used of the host's blocks until `wanted` are free, if there are
        as many; returns how many of those wanted are."""
        while (missing := wanted - self._host.num_free) > 0:
            number = self._host_ends.pop()
            if number is None:
                break
            node = self._nodes[number]
            dropped = self._alike(node.blocks[node.on_device :][-missing:])
            expected = int(self._awaited[node.blocks[-dropped:]].sum())
            self._host.reuse.count(dropped=dropped - expected)
            self._cut(node, len(node.blocks) - dropped)
        return min(wanted, self._host.num_free)

    def _cut(self, node: _Node, keep: int) -> BlockArray:
        """Drops what follows the first `keep` blocks of a node; returns the device's blocks."""
        below = [n for child in node.children.values() for n in _subtree(child)]
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

    def _forget(self, blocks: BlockArray) -> None:
        self._node_of[blocks] = _NO_NODE
        self._unproven[blocks] = False
        self._awaited[blocks] = False

    def _trim(self, node: _Node, keep: int) -> None:
        """Leaves a node without children its first `keep` blocks; without any it goes."""
        if keep:
            node.blocks = node.blocks[:keep]
            node.on_device = min(keep, node.on_device)
            # Not at every block: copying a long run for each would cost more than it frees.
            if len(node.data) > 2 * keep * self._block_bytes:
                node.blocks = node.blocks.copy()
                node.data = node.data[: keep * self._block_bytes]
            self._offer(node)
            return
        parent = node.parent
        assert parent is not None
        parent.device_children -= node.on_device > 0
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
