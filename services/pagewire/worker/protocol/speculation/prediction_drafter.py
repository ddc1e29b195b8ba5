"""Drafts from the client's own prediction: the tokens after the place that the output reached."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from pagewire.packing import Int32Array

# How many tokens at the end of the output must be in the prediction, and how many are compared.
SHORTEST_MATCH = 3
LONGEST_MATCH = 24
# Up to this many tokens after the place where an edit began, one equal token is a match: most edits
# replace only a few tokens.
NEAR = 12


class PredictionDrafter:
    """The prediction of one sequence, and the place in it that the output has reached.

    While the output follows the prediction, a token costs one comparison. After an edit, array
    operations find the places of the last token and compare the tokens before them.
    """

    __slots__ = ("_at", "_lost", "_lost_at", "_recent", "_right", "_tokens")

    def __init__(self, tokens: Int32Array, output: Int32Array) -> None:
        """`tokens [n]` are the prediction, `output [m]` the tokens generated so far."""
        self._tokens = tokens
        self._recent: deque[int] = deque(output[-LONGEST_MATCH:].tolist(), LONGEST_MATCH)
        # The place of the next token, and how many tokens before it were right without a gap.
        self._at = 0
        self._right = 0
        # Whether the output has left the prediction, and the place where it did.
        self._lost = len(output) > 0
        self._lost_at = min(len(output), len(tokens))

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens of the output."""
        for token in tokens:
            self._recent.append(token)
            if self._lost:
                continue
            if self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._at += 1
                self._right += 1
                continue
            # A wrong guess of the place does not move the place where the edit began.
            if self._right >= SHORTEST_MATCH:
                self._lost_at = self._at
            self._lost, self._right = True, 0

    @property
    def ready(self) -> bool:
        """Whether the output follows the prediction, after a search if it had left it."""
        if self._lost and (found := self._search()) is not None:
            self._at, self._lost = found, False
        return not self._lost and self._at < len(self._tokens)

    def draft(self, most: int) -> Int32Array:
        """At most `most` tokens `[n]` that may come next; call it only if it is `ready`."""
        return self._tokens[self._at : self._at + max(0, most)]

    def _search(self) -> int | None:
        """The place after the longest match of the output's end; None if no match is good enough.

        Of several longest matches, the first one after the edit counts. A match shorter than
        `SHORTEST_MATCH` counts only near the edit.
        """
        tokens, recent = self._tokens, self._recent
        behind = np.flatnonzero(tokens == recent[-1]) + 1
        near = behind[(behind > self._lost_at) & (behind <= self._lost_at + NEAR)]
        matched = 1
        while len(behind) and matched < len(recent):
            longer = behind[behind > matched]
            longer = longer[tokens[longer - matched - 1] == recent[-matched - 1]]
            if not len(longer):
                break
            behind, matched = longer, matched + 1
        if len(behind) and matched >= SHORTEST_MATCH:
            after = behind[behind > self._lost_at]
            return int(after[0] if len(after) else behind[-1])
        both = near[np.isin(near, behind)]
        if len(both):
            return int(both[0])
        return int(near[0]) if len(near) else None
