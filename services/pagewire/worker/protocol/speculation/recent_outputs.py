"""Drafts from recent outputs of the same cache salt.

Each salt has an object of its own, so no draft shows tokens of another salt, as with the prefix
cache. The memory is at most `MAX_SALTS` times 384 KiB. A salt uses none before its first output.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array

# How many tokens at the end of an output must be equal.
MATCH = 4
# Tokens that are kept of one salt.
CAPACITY = 1 << 15
# The index has 2^_BITS places.
_BITS = 16
MAX_SALTS = 64

_FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in Fibonacci hashing
_WORD = (1 << 64) - 1
_END = -1  # after the tokens of each output
_NONE = np.empty(0, np.int32)


class RecentOutputs:
    """The latest outputs of one salt, and an index of them by their runs of `MATCH` tokens.

    Tokens are written one after the other, over the oldest ones. The index has one place for each
    hash, and the latest run wins. A place is compared with the tokens before it is used, so it may
    be outdated.
    """

    __slots__ = ("_end", "_older_end", "_places", "_tokens")

    def __init__(self) -> None:
        # Zeros use no memory before they are written, and are not read before that.
        self._tokens = np.zeros(CAPACITY, np.int32)
        self._places = np.zeros(1 << _BITS, np.int32)
        self._end = 0
        # The end of the older tokens that are not overwritten yet; they begin at `_end`.
        self._older_end = 0

    def add(self, tokens: Int32Array) -> None:
        """Adds tokens `[n]` that follow one another, the last `CAPACITY` of them at most."""
        tokens = tokens[1 - CAPACITY :]
        if len(tokens) <= MATCH:
            return
        if self._end + len(tokens) >= CAPACITY:
            self._end, self._older_end = 0, self._end
        begin, end = self._end, self._end + len(tokens)
        self._tokens[begin:end] = tokens
        self._tokens[end] = _END
        self._end = end + 1
        # The places after each run; nothing follows the last run.
        self._places[_slots(tokens[:-1])] = np.arange(begin + MATCH, end, dtype=np.int32)

    def latest(self, most: int) -> Int32Array:
        """At most `most` of the latest tokens `[n]`; the token -1 follows each output."""
        older = self._tokens[self._end : self._older_end]
        newer = self._tokens[: self._end]
        if len(newer) < most:
            newer = np.concatenate((older, newer))
        return newer[-most:].copy()

    def draft(self, last: Int32Array, most: int) -> Int32Array:
        """At most `most` tokens `[n]` that followed the latest occurrence of `last [MATCH]`."""
        place = int(self._places[_slot(last)])
        found = self._tokens[place - MATCH : place]
        if place < MATCH or not np.array_equal(found, last):
            return _NONE
        after = self._tokens[place : place + max(0, most)]
        ends = (after == _END).nonzero()[0]
        return (after[: ends[0]] if len(ends) else after).copy()


class RecentBySalt:
    """The recent outputs of the salts that were used last."""

    __slots__ = ("_salts",)

    def __init__(self) -> None:
        self._salts: OrderedDict[str, RecentOutputs] = OrderedDict()

    def of(self, salt: str) -> RecentOutputs:
        """The recent outputs of a salt. The salt that was used longest ago may be dropped."""
        found = self._salts.get(salt)
        if found is None:
            found = self._salts[salt] = RecentOutputs()
        self._salts.move_to_end(salt)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        return found


def _slots(tokens: Int32Array) -> NDArray[np.intp]:
    """The places in the index of all runs of `tokens [n]`, `[n - MATCH + 1]`."""
    values = tokens.astype(np.uint64)
    count = len(tokens) - MATCH + 1
    hashed = np.zeros(count, np.uint64)
    for i in range(MATCH):
        hashed = hashed * np.uint64(_FACTOR) + values[i : i + count]
    return (hashed * np.uint64(_FACTOR) >> np.uint64(64 - _BITS)).astype(np.intp)


def _slot(last: Int32Array) -> int:
    """`_slots` of one run `[MATCH]`; Python's integers take a tenth of numpy's time for it."""
    hashed = 0
    for token in last.tolist():
        hashed = hashed * _FACTOR + token & _WORD
    return (hashed * _FACTOR & _WORD) >> (64 - _BITS)
