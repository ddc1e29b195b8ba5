"""The order of eviction: the node whose last block was used longest ago comes first."""

import heapq
from collections.abc import Callable


class EvictionOrder:
    """A heap of (last use of the end, node).

    An entry is stale if the node's end has changed or was used since; `pop` skips it. Invariant:
    every node with an end to evict has an entry that is not stale.
    """

    __slots__ = ("_entries", "_last_use")

    def __init__(self, last_use: Callable[[int], int | None]) -> None:
        """`last_use` returns when a node's end was last used, None if it has no end to evict."""
        self._entries: list[tuple[int, int]] = []
        self._last_use = last_use

    def offer(self, node: int, num_nodes: int) -> None:
        """Adds a node if it has an end to evict; `num_nodes` bounds the size of the heap."""
        used_at = self._last_use(node)
        if used_at is None:
            return
        heapq.heappush(self._entries, (used_at, node))
        if len(self._entries) > 2 * num_nodes + 16:
            self._entries = [entry for entry in set(self._entries) if self._is_current(entry)]
            heapq.heapify(self._entries)

    def pop(self) -> int | None:
        """Takes the node whose end was used longest ago; None if no node has an end to evict.

        The caller must offer the node again.
        """
        while self._entries:
            entry = heapq.heappop(self._entries)
            if self._is_current(entry):
                return entry[1]
        return None

    def missing(self, nodes: list[int]) -> list[int]:
        """Those of `nodes` that break the invariant."""
        entries = set(self._entries)
        uses = [(self._last_use(node), node) for node in nodes]
        return [node for use, node in uses if use is not None and (use, node) not in entries]

    def _is_current(self, entry: tuple[int, int]) -> bool:
        return self._last_use(entry[1]) == entry[0]
