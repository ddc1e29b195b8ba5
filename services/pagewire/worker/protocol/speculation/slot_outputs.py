"""Outputs of running sequences, until they end and other sequences may draft from them.

For backends that draft on the device: the device gets recent outputs only when a sequence starts.
So an output joins the recent outputs of its salt as a whole, and steps only queue their results.
"""

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.recent_outputs import MATCH, RecentBySalt

# Tokens of recent outputs that the device searches for a sequence, two tiles. With recorded JSON a
# step has 7 % fewer tokens with 1,024, and 2 % more with 4,096; see docs/decisions/speculation.md.
SEARCHED = 2048
# The most queued results. They add at most `SEARCHED` tokens to a slot.
QUEUED = 64


class SlotOutputs:
    """The latest output tokens of each slot, and the recent outputs of each salt."""

    __slots__ = ("_counts", "_recent", "_results", "_salts", "_tokens")

    def __init__(self, num_slots: int) -> None:
        self._recent = RecentBySalt()
        self._salts = [""] * num_slots
        # The token with the number i is in column i % SEARCHED.
        self._tokens = np.zeros((num_slots, SEARCHED), np.int32)
        self._counts = np.zeros(num_slots, np.int64)
        self._results: list[tuple[Int32Array, Int32Array]] = []

    def start(self, slot: int, salt: str, known: Int32Array) -> None:
        """Starts a sequence with the tokens `known [n]` in a slot."""
        before = known[-MATCH:]  # so that a search can find the output's first tokens
        self._salts[slot] = salt
        self._tokens[slot, : len(before)] = before
        self._counts[slot] = len(before)

    def add(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Adds the tokens `[n]` of a step to `slots [n]`, in their order."""
        self._results.append((slots, tokens))
        if len(self._results) == QUEUED:
            self._sort()

    def publish(self, running: Int32Array) -> None:
        """Lets other sequences draft from the outputs of all slots except `running [n]`."""
        self._sort()
        for slot in np.setdiff1d(np.flatnonzero(self._counts > MATCH), running).tolist():
            count = int(self._counts[slot])
            tokens = np.roll(self._tokens[slot], -count)[-count:]
            self._recent.of(self._salts[slot]).add(tokens)
            self._counts[slot] = 0

    def recent(self, salt: str) -> Int32Array:
        """The latest recent outputs of a salt, at most `SEARCHED` tokens; see `latest`."""
        return self._recent.of(salt).latest(SEARCHED)

    def _sort(self) -> None:
        """Moves the queued tokens to their slots."""
        if not self._results:
            return
        slots, tokens = (np.concatenate(part) for part in zip(*self._results, strict=True))
        self._results.clear()
        order = np.argsort(slots, kind="stable")
        found, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
        places: NDArray[np.int64] = np.arange(len(slots)) - np.repeat(begins, counts)
        places += np.repeat(self._counts[found], counts)
        self._tokens[slots[order], places % SEARCHED] = tokens[order]
        self._counts[found] += counts
