"""Which running sequences share the blocks of their beginnings, for attention that reads a shared
beginning once for all of them.

A radix tree over the block tables of the decoding slots: its keys are block numbers, where those
of `PrefixTree` are tokens. A slot enters when it starts to decode and leaves when it stops; steps
in between cost nothing. Blocks that a slot gets later are its own, so the blocks at its entry
tell what it shares.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from pagewire.scheduler.core.kv.prefix_tree import BlockArray

# One sequence shares nothing.
MIN_MEMBERS = 2
# Reading a run once costs another pass over its group's queries, and combining two results for
# each member; below 64 tokens, at blocks of 16, that is more than reading the blocks again.
MIN_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Slots whose block tables begin alike.

    `blocks` leading blocks are common to all of `slots`, which are in ascending order. Groups
    nest: the members of an inner one are some of the outer one's, and its `blocks` are more.
    """

    blocks: int
    slots: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks [n] that all slots below share; `depth` blocks end with it."""

    run: BlockArray
    depth: int
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)  # whose tables end here


class PrefixGroups:
    """The groups of the slots that are in. Outer groups come before those inside them."""

    __slots__ = ("_at", "_groups", "_root", "_stale")

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, dtype=np.int64), 0, None)
        self._at: dict[int, _Node] = {}
        self._groups: list[PrefixGroup] = []
        # Whether a slot that shares blocks has come or gone since the groups were made.
        self._stale = False

    def __contains__(self, slot: int) -> bool:
        return slot in self._at

    def slots(self) -> Set[int]:
        """The slots that are in."""
        return self._at.keys()

    def add(self, slot: int, blocks: Sequence[int]) -> None:
        """A slot that is not in starts to decode with a block table."""
        assert slot not in self._at, f"slot {slot} is grouped already"
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
        self._at[slot] = node

    def discard(self, slot: int) -> None:
        """The slot stops decoding; one that is not in is none of the groups' business."""
        node = self._at.pop(slot, None)
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
        """Brings `groups` up to date; whether they are others than before."""
        if not self._stale:
            return False
        self._stale = False
        before, self._groups = self._groups, []
        self._collect()
        self._groups.sort(key=lambda group: (group.slots[0], group.blocks))
        return self._groups != before

    @property
    def groups(self) -> list[PrefixGroup]:
        """As of the latest `refresh`."""
        return self._groups

    def _collect(self) -> None:
        """Makes the groups: a node that adds enough blocks to the group around it is one."""
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
                if child.children or len(child.slots) >= MIN_MEMBERS  # most are one slot's alone
            ]


def _common(run: BlockArray, table: BlockArray) -> int:
    """Blocks at the beginning of both; both are not empty."""
    size = min(len(run), len(table))
    differs = run[:size] != table[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def _split(node: _Node, keep: int) -> _Node:
    """Gives the first `keep` blocks of a run to a new node above it; returns the new one."""
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
