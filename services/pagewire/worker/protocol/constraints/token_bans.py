"""Constraints on token ids alone: a list of allowed tokens, and banned sequences of tokens."""

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from pagewire.worker.protocol.constraints.constraint import Constraint

Words = NDArray[np.int32]  # bit i % 32 of word i // 32 is set if token i may come


class TokenBans:
    """Follows the output of a sequence and excludes tokens by their ids."""

    def __init__(self, constraint: Constraint, words: int) -> None:
        """`words`: how many words of 32 bits a mask has."""
        self._constraint = constraint
        self._static = np.full(words, -1, np.int32)
        if len(constraint.allowed_token_ids):
            self._static[:] = 0
            set_bits(self._static, constraint.allowed_token_ids.astype(np.int64))
        # Banned sequences by their second-to-last token: all tokens before the last, and the last.
        self._bans: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        longest = 1
        for *before, last in constraint.banned():
            if before:
                self._bans[before[-1]].append((before, last))
                longest = max(longest, len(before))
            else:
                clear_bits(self._static, np.array([last]))
        self._recent: deque[int] = deque(maxlen=longest)

    def fields(self) -> list[str]:
        """The fields of the request that exclude tokens here."""
        given = self._constraint
        lengths = {"allowed_token_ids": given.allowed_token_ids, "bad_words": given.banned_lengths}
        return [name for name, array in lengths.items() if len(array)]

    def advance(self, token: int) -> None:
        """Takes the next token of the output."""
        self._recent.append(token)

    def narrow(self, mask: Words) -> None:
        """Clears the bits in `mask [words]` of tokens that must not come next."""
        np.bitwise_and(mask, self._static, out=mask)
        if not self._recent or self._recent[-1] not in self._bans:
            return
        recent = list(self._recent)
        last = [end for before, end in self._bans[recent[-1]] if recent[-len(before) :] == before]
        clear_bits(mask, np.array(last, np.int64))


def clear_bits(mask: Words, ids: NDArray[np.int64]) -> None:
    """Clears the bits of token `ids [n]`."""
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~_bits(ids))


def set_bits(mask: Words, ids: NDArray[np.int64]) -> None:
    """Sets the bits of token `ids [n]`."""
    np.bitwise_or.at(mask.view(np.uint32), ids >> 5, _bits(ids))


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
