"""How many rows a step on a GPU has, and which sequences draft in them.

A step with more rows takes longer and may return more tokens. `RowChoice` chooses the number of
rows with the most tokens a second, from step times measured at the worker's start. Each sequence
has one row; the other rows go to the drafts that are most likely to be right. If the drafts of a
sequence are right with probability p, its first j drafts are all right with probability p^j.

A draft model runs before the step: once for each draft of the sequence with the most drafts, and
once more for the last draft's KV. So `RowChoice` also limits the drafts of a sequence.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array

Floats = NDArray[np.float64]

# Drafts must raise the tokens a second by this factor: the probabilities and times are not exact,
# and a step with drafts costs the host more.
GAIN = 1.03
# Drafts less likely than this are left out of all steps, because their rows cost attention.
MIN_PROBABILITY = 0.1
# Up to this many sequences, drafts are chosen in each step, not once for several steps.
FEW_SEQUENCES = 16
# With a draft model, these numbers are compared as the most drafts of a sequence.
DEPTHS = (1, 2, 3, 5, 8, 15)


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The time that rows of a decode step take on a device."""

    rows: Int32Array  # [n], the numbers of rows that a step may have, ascending
    seconds: Floats  # [n], the time of such a step without attention
    token_seconds: float  # the time of a row's attention to one KV token
    # [n], the time of a draft model's pass for `rows` sequences. None: there is no draft model.
    passes: Floats | None = None


class RowChoice:
    """Chooses the drafts of steps by the costs of one device."""

    def __init__(self, costs: RowCosts, most: int) -> None:
        """`most`: the most drafts of a sequence."""
        self._costs = costs
        self._powers = np.arange(1, most + 1)
        self._least: dict[int, float] = {}  # by the number of sequences, see `_least_rate`
        self.most_rows = int(costs.rows[-1])  # of a step

    def lengths(self, rates: Floats, most: Int32Array, kv_tokens: float) -> Int32Array:
        """The number of drafts of each sequence of a step, `[sequences]`.

        Args:
            rates: `[sequences]`, the probability that a draft of each is right.
            most: `[sequences]`, the most drafts of each.
            kv_tokens: the mean number of KV tokens of a sequence.
        """
        sequences, passes = len(rates), self._costs.passes
        if passes is not None and sequences:
            return self._with_passes(rates, most, kv_tokens, passes)
        # For few sequences a comparison answers most steps in which drafts do not pay.
        few = 0 < sequences <= FEW_SEQUENCES
        if few and float(rates.max()) < self._least_rate(sequences):
            return np.zeros(sequences, np.int32)
        return self._chosen(rates, most, kv_tokens)[0]

    def _with_passes(
        self, rates: Floats, most: Int32Array, kv_tokens: float, passes: Floats
    ) -> Int32Array:
        """`lengths` with a draft model whose passes take `passes`; see `RowCosts.passes`."""
        at = min(int(np.searchsorted(self._costs.rows, len(rates))), len(passes) - 1)
        one = float(passes[at])
        best, speed = self._chosen(rates, np.zeros_like(most), kv_tokens, one)
        speed *= GAIN
        for depth in DEPTHS:
            shortened = np.minimum(most, depth)
            lengths, found = self._chosen(rates, shortened, kv_tokens, one * (1 + depth))
            if found > speed:
                best, speed = lengths, found
        return best

    def _least_rate(self, sequences: int) -> float:
        """A rate below which no draft of `sequences` sequences pays.

        Found by bisection for sequences that all have this rate, and no KV to attend to.
        """
        found = self._least.get(sequences)
        if found is None:
            most = np.full(sequences, len(self._powers), np.int32)
            found, high = 0.0, 1.0
            for _ in range(12):
                rate = (found + high) / 2
                pays = self._chosen(np.full(sequences, rate), most, 0.0)[0].any()
                found, high = (found, rate) if pays else (rate, high)
            self._least[sequences] = found
        return found

    def _chosen(
        self, rates: Floats, most: Int32Array, kv_tokens: float, more_seconds: float = 0.0
    ) -> tuple[Int32Array, float]:
        """`lengths`, after a comparison of all numbers of rows, and the tokens a second.

        Each step takes `more_seconds` in addition to the time in `RowCosts`.
        """
        sequences, costs = len(rates), self._costs
        first = int(np.searchsorted(costs.rows, sequences))
        end = int(np.searchsorted(costs.rows, sequences + int(most.sum()))) + 1
        rows = costs.rows[first:end]
        if not len(rows) or rows[-1] == sequences:
            attended = costs.token_seconds * kv_tokens * sequences
            seconds_of_all = float(costs.seconds[min(first, len(costs.rows) - 1)]) + attended
            return np.zeros(sequences, np.int32), sequences / (seconds_of_all + more_seconds)
        # [sequences, most], the probability that a draft becomes a token; 0 beyond `most`.
        values = rates[:, None] ** self._powers
        values[self._powers > most[:, None]] = 0
        flat = values.ravel()
        flat[flat < MIN_PROBABILITY] = 0
        order = np.argsort(-flat, kind="stable")
        useful = int(np.count_nonzero(flat))
        gained = np.concatenate(([0.0], np.cumsum(flat[order[:useful]])))
        drafts = np.minimum(rows - sequences, useful)  # [candidates]
        # Padding rows do not attend to anything.
        seconds = costs.seconds[first:end] + costs.token_seconds * kv_tokens * (sequences + drafts)
        seconds += more_seconds
        speed = (sequences + gained[drafts]) / seconds
        best = int(np.argmax(speed))
        if speed[best] < GAIN * speed[0]:
            best = 0
        chosen = order[: drafts[best]] // len(self._powers)
        lengths = np.bincount(chosen, minlength=sequences).astype(np.int32)
        return lengths, float(speed[best])
