"""The upper part of a prefix tree: the sizes of its nodes and their use, without their tokens."""

from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.kv.prefix_node import PrefixNode
from pagewire.scheduler.core.kv.prefix_tree import PrefixTree

MAX_DEPTH = 8
# Only this many of a node's children are compared, the newest ones. The outline has those of them
# with the most hits, up to _CHILDREN.
_CONSIDERED = 256
_CHILDREN = 16


@dataclass(frozen=True, slots=True)
class NodeOutline:
    """A node: the place of its parent in the outline (-1 for none), and its sizes.

    `hits` and `holders` are those of its first block, which no other block of it exceeds.
    """

    parent: int
    blocks: int
    on_device: int
    hits: int
    holders: int


def outline(tree: PrefixTree, references: NDArray[np.int32], max_nodes: int) -> list[NodeOutline]:
    """At most `max_nodes` nodes, level by level. Takes time in proportion to them only."""
    hits = tree.use.hits
    found: list[NodeOutline] = []
    level: list[tuple[int, PrefixNode]] = [(-1, root) for root in islice(tree.roots(), _CHILDREN)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[int, PrefixNode]] = []
        for parent, above in level:
            newest = islice(reversed(above.children.values()), _CONSIDERED)
            for node in nlargest(_CHILDREN, newest, key=lambda node: hits[node.blocks[0]]):
                if len(found) == max_nodes:
                    return found
                first = int(node.blocks[0])
                below.append((len(found), node))
                found.append(
                    NodeOutline(
                        parent,
                        len(node.blocks),
                        node.on_device,
                        int(hits[first]),
                        int(references[first]),
                    )
                )
        level = below
    return found
