"""Groups of decoding slots whose block tables begin alike, for shared-prefix (cascade) attention.

Attention reads the shared blocks once for the whole group. The groups come from a radix tree over
the block tables of the decoding slots; its keys are block numbers, where those of `PrefixTree` are
tokens. A slot is added when it starts to decode and removed when it stops, so steps in between
cost nothing. Blocks that a slot gets later are its own: the blocks at its start are enough.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from pagewire.scheduler.core.kv.prefix_node import BlockArray

MIN_MEMBERS = 2
# Reading a run once costs another pass over the group's queries, and merging two results for each
# member. Below 64 tokens (4 blocks of 16) reading the blocks again is cheaper.
MIN_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Slots whose block tables begin with the same blocks.

    All of `slots`, in ascending order, have `blocks` leading blocks in common. Groups nest: an
    inner group has some of the slots of the outer one, and more blocks.
    """

    blocks: int
    slots: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks [n] that all slots below share; `depth` blocks up to its end."""

    run: BlockArray
    depth: int
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)  # whose tables end here


class PrefixGroups:
    """The groups of the decoding slots. Outer groups come before those inside them."""

    __slots__ = ("_groups", "_node_of", "_root", "_stale")

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, dtype=np.int64), 0, None)
        self._node_of: dict[int, _Node] = {}
        self._groups: list[PrefixGroup] = []
        # Whether a slot that shares blocks was added or removed since the groups were made.
        self._stale = False

    def __contains__(self, slot: int) -> bool:
        return slot in self._node_of

    def slots(self) -> Set[int]:
        """The slots in the tree."""
        return self._node_of.keys()

    def add(self, slot: int, blocks: Sequence[int]) -> None:
        """Adds a slot that starts to decode with a block table; it must not be in the tree."""
        assert slot not in self._node_of, f"slot {slot} is in the tree already"
        table = np.array(blocks, dtype=np.int64)
        node = self._root
        while node.depth < len(table):
            child = node.children.get(int(table[node.depth]))
            if child is None:
                child = _Node(table[node.depth :], len(table), node)
                node.children[int(child.run[0])] = child
            else:
                self._stale = True
                common = _common(child.run, table[node.depth :])
                if common < len(child.run):
                    child = _split(child, common)
            node = child
        node.slots.add(slot)
        self._node_of[slot] = node

    def discard(self, slot: int) -> None:
        """Removes a slot that stops decoding, if it is in the tree."""
        node = self._node_of.pop(slot, None)
        if node is None:
            return
        node.slots.remove(slot)
        self._stale |= bool(node.slots or node.children)
        parent = node.parent
        while parent is not None and not node.slots and len(node.children) < 2:
            self._stale |= parent.parent is not None
            del parent.children[int(node.run[0])]
            if node.children:
                [child] = node.children.values()
                child.run, child.parent = np.concatenate([node.run, child.run]), parent
                parent.children[int(child.run[0])] = child
                return
            node, parent = parent, parent.parent

    def refresh(self) -> bool:
        """Brings `groups` up to date; returns whether they have changed."""
        if not self._stale:
            return False
        self._stale = False
        before, self._groups = self._groups, []
        self._collect()
        self._groups.sort(key=lambda group: (group.slots[0], group.blocks))
        return self._groups != before

    @property
    def groups(self) -> list[PrefixGroup]:
        """The groups as of the latest `refresh`."""
        return self._groups

    def _collect(self) -> None:
        """Makes a group of each node that adds MIN_BLOCKS or more to the group around it."""
        pending = [(self._root, 0)]
        while pending:
            node, shared = pending.pop()
            if node.depth - shared >= MIN_BLOCKS:
                members = sorted(slot for below in _subtree(node) for slot in below.slots)
                self._groups.append(PrefixGroup(node.depth, tuple(members)))
                shared = node.depth
            pending += [
                (child, shared)
                for child in node.children.values()
                if child.children or len(child.slots) >= MIN_MEMBERS
            ]


def _common(run: BlockArray, table: BlockArray) -> int:
    """Blocks at the beginning of both; both are not empty."""
    size = min(len(run), len(table))
    differs = run[:size] != table[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def _split(node: _Node, keep: int) -> _Node:
    """Moves the first `keep` blocks of a run to a new node above it; returns the new node."""
    assert node.parent is not None
    above = _Node(node.run[:keep], node.parent.depth + keep, node.parent)
    node.parent.children[int(above.run[0])] = above
    node.run, node.parent = node.run[keep:], above
    above.children[int(node.run[0])] = node
    return above


def _subtree(node: _Node) -> list[_Node]:
    nodes = [node]
    for found in nodes:
        nodes += found.children.values()
    return nodes
