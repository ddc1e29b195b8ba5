"""Drafts from a sequence's own tokens: those that followed an earlier copy of its last tokens."""

import numpy as np

from pagewire.packing import Int32Array

# The fewest tokens at the end of a sequence that must match earlier ones, and the most compared.
SHORTEST_MATCH = 3
LONGEST_MATCH = 24

_NONE = np.empty(0, np.int32)


class SuffixDrafter:
    """The known tokens of one sequence, and the search for the longest repeated suffix.

    Adding a token costs a write. A search compares the last token with all others in one array
    operation, so it needs no index: 0.1 ms for 100,000 tokens.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: Int32Array) -> None:
        """`tokens [n]`: the prompt and the output so far."""
        self._length = len(tokens)
        self._tokens = np.empty(max(256, 2 * len(tokens)), np.int32)
        self._tokens[: len(tokens)] = tokens

    @property
    def tokens(self) -> Int32Array:
        """All known tokens `[n]`; the next `extend` may write after them."""
        return self._tokens[: self._length]

    def extend(self, tokens: Int32Array) -> None:
        """Adds tokens `[n]` of the output."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(2 * end, np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : end] = tokens
        self._length = end

    def draft(self, most: int) -> Int32Array:
        """At most `most` tokens that may come next `[n]`; empty if the end is new.

        Of the places with the longest match, the latest with `most` tokens after it counts, or else
        the earliest.
        """
        tokens, length = self._tokens[: self._length], self._length
        if most < 1 or length <= SHORTEST_MATCH:
            return _NONE
        # Positions after earlier occurrences of the suffix, ascending.
        behind = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        matched = 1
        while len(behind) and matched < LONGEST_MATCH:
            longer = behind[behind > matched]
            longer = longer[tokens[longer - matched - 1] == tokens[-matched - 1]]
            if not len(longer):
                break
            behind, matched = longer, matched + 1
        if not len(behind) or matched < SHORTEST_MATCH:
            return _NONE
        whole = behind[behind <= length - most]
        begin = int(whole[-1] if len(whole) else behind[0])
        return tokens[begin : begin + most].copy()
