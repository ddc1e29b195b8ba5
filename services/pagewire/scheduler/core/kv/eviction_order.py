"""Which of the nodes of a tree gives up its end next: the one whose end was used longest ago."""

import heapq
from collections.abc import Callable


class EvictionOrder:
    """A heap of (last use of the end, node) that is told of every end and asked for the oldest.

    An entry is stale if the end has been used, or anything has changed, since; it is skipped when
    it comes to the top.
    """

    __slots__ = ("_entries", "_last_use")

    def __init__(self, last_use: Callable[[int], int | None]) -> None:
        """`last_use` says of a node when its end was last used, None if it has none to give up."""
        self._entries: list[tuple[int, int]] = []
        self._last_use = last_use

    def offer(self, node: int, most: int) -> None:
        """A node may have an end to give up; there are at most `most` nodes."""
        used_at = self._last_use(node)
        if used_at is None:
            return
        heapq.heappush(self._entries, (used_at, node))
        if len(self._entries) > 2 * most + 16:
            self._entries = [entry for entry in set(self._entries) if self._is_current(entry)]
            heapq.heapify(self._entries)

    def pop(self) -> int | None:
        """The node whose end was used longest ago, which must be offered again afterwards; None
        if no node has an end to give up."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if self._is_current(entry):
                return entry[1]
        return None

    def missing(self, nodes: list[int]) -> list[int]:
        """Those of `nodes` that would never be found although they have an end to give up."""
        entries = set(self._entries)
        uses = [(self._last_use(node), node) for node in nodes]
        return [node for use, node in uses if use is not None and (use, node) not in entries]

    def _is_current(self, entry: tuple[int, int]) -> bool:
        return self._last_use(entry[1]) == entry[0]
