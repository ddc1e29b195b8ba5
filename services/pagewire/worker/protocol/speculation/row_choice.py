"""How many rows a step on a GPU has, and which sequences draft in them.

A step of more rows takes longer, and may give more tokens. So of all numbers of rows the one is
chosen that gives the most tokens a second, by the times that were measured when the worker started.
The rows beside those of the sequences go to the drafts that are right most likely: draft number j
of a sequence is right with probability p^j, if its drafts are right with probability p.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array

Floats = NDArray[np.float64]

# More rows must give so many times the tokens a second: neither the probabilities nor the times are
# exact, and a step with drafts costs the host more.
GAIN = 1.03
# In a step of any size, drafts that are right less often are left out: they cost attention.
LEAST = 0.1
# For so few sequences drafts are chosen in each step, after a look at the highest rate.
FEW_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The time that rows of a decode step take on a device."""

    rows: Int32Array  # [n], the numbers of rows that a step may have, ascending
    seconds: Floats  # [n], what such a step takes beside attention
    token_seconds: float  # of a row's attention to one KV token


class RowChoice:
    """Chooses the drafts of steps by the costs of one device."""

    def __init__(self, costs: RowCosts, most: int) -> None:
        """`most` drafts of a sequence at most."""
        self._costs = costs
        self._powers = np.arange(1, most + 1)
        self._least: dict[int, float] = {}  # by the number of sequences, see `_least_rate`

    def lengths(self, rates: Floats, most: Int32Array, kv_tokens: float) -> Int32Array:
        """The number of drafts of each sequence of a step, `[sequences]`.

        Args:
            rates: `[sequences]`, the probability of each that a draft is right.
            most: `[sequences]`, the most drafts of each.
            kv_tokens: the mean KV tokens of a sequence.
        """
        sequences = len(rates)
        few = 0 < sequences <= FEW_SEQUENCES
        if few and float(rates.max()) < self._least_rate(sequences):
            return np.zeros(sequences, np.int32)
        return self._chosen(rates, most, kv_tokens)

    def _least_rate(self, sequences: int) -> float:
        """A rate below which no draft of so many sequences pays: not if all have it, and no KV."""
        found = self._least.get(sequences)
        if found is None:
            most = np.full(sequences, len(self._powers), np.int32)
            found, high = 0.0, 1.0
            for _ in range(12):
                rate = (found + high) / 2
                pays = self._chosen(np.full(sequences, rate), most, 0.0).any()
                found, high = (found, rate) if pays else (rate, high)
            self._least[sequences] = found
        return found

    def _chosen(self, rates: Floats, most: Int32Array, kv_tokens: float) -> Int32Array:
        """The same as `lengths`, by all numbers of rows."""
        sequences, costs = len(rates), self._costs
        first = int(np.searchsorted(costs.rows, sequences))
        end = int(np.searchsorted(costs.rows, sequences + int(most.sum()))) + 1
        rows = costs.rows[first:end]
        if not len(rows) or rows[-1] == sequences:
            return np.zeros(sequences, np.int32)
        # [sequences, most], the probability that a draft becomes a token; 0 for one too many.
        values = rates[:, None] ** self._powers
        values[self._powers > most[:, None]] = 0
        flat = values.ravel()
        flat[flat < LEAST] = 0
        order = np.argsort(-flat, kind="stable")
        useful = int(np.count_nonzero(flat))
        gained = np.concatenate(([0.0], np.cumsum(flat[order[:useful]])))
        drafts = np.minimum(rows - sequences, useful)  # [candidates]
        # Rows without a draft attend to nothing.
        seconds = costs.seconds[first:end] + costs.token_seconds * kv_tokens * (sequences + drafts)
        speed = (sequences + gained[drafts]) / seconds
        best = int(np.argmax(speed))
        if speed[best] < GAIN * speed[0]:
            best = 0
        chosen = order[: drafts[best]] // len(self._powers)
        return np.bincount(chosen, minlength=sequences).astype(np.int32)
