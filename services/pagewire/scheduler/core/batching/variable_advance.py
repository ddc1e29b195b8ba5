"""Token counts of decode rows that get several tokens in a step, on a worker that speculates.

The answer to a step has the number of tokens of each row. Until then `SlotTable.computed` is the
most that the slot may have computed, so that its blocks suffice. `SlotTable.sampled` is the fewest
tokens that it has drawn, so that it decodes until it surely ends. Both are exact while no decode
row of the slot is in flight.
"""

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.batching.slot_table import SlotArray, SlotTable
from pagewire.scheduler.core.sequence import Sequence


class VariableAdvance:
    """Counts the tokens of decode rows that get 1 to `row_tokens` of them."""

    __slots__ = ("_accepted", "_ahead", "_longest", "_prompt", "_rejected", "_row_tokens", "_table")

    def __init__(self, table: SlotTable, row_tokens: int) -> None:
        num_slots = len(table.live)
        self._table = table
        self._row_tokens = row_tokens
        # By slot: decode rows that are not answered, tokens of the prompt, and the most tokens
        # whose KV is ever needed.
        self._ahead = np.zeros(num_slots, np.int32)
        self._prompt = np.zeros(num_slots, np.int32)
        self._longest = np.zeros(num_slots, np.int32)
        # Tokens of predictions that were drafted since the slot was occupied: right, and wrong.
        self._accepted = np.zeros(num_slots, np.int32)
        self._rejected = np.zeros(num_slots, np.int32)

    def occupy(self, slot: int, sequence: Sequence) -> None:
        """A sequence has taken a slot."""
        self._ahead[slot] = 0
        self._prompt[slot] = len(sequence.prompt)
        self._longest[slot] = sequence.max_computed
        self._accepted[slot] = self._rejected[slot] = 0

    def vacate(self, slot: int, sequence: Sequence) -> None:
        """A sequence leaves its slot."""
        sequence.accepted_prediction += int(self._accepted[slot])
        sequence.rejected_prediction += int(self._rejected[slot])

    def note_accepted(self, slots: SlotArray) -> None:
        """Counts one accepted token of a prediction for each of `slots [n]`."""
        self._accepted[slots] += 1

    def note_rejected(self, slots: SlotArray, counts: Int32Array) -> None:
        """Counts drafted tokens of the predictions of `slots [n]` that were wrong."""
        self._rejected[slots] += counts

    def lacking(self) -> NDArray[np.bool_]:
        """The decoding slots `[slots]` whose blocks may be too few for their next row."""
        table = self._table
        return (self._after_next_row() > table.capacity) & table.decoding

    def advance(self) -> None:
        """Counts a planned step's row of each decoding slot."""
        table = self._table
        np.copyto(table.computed, self._after_next_row(), where=table.decoding)
        table.sampled += table.decoding
        self._ahead += table.decoding

    def settle(self, slots: SlotArray) -> SlotArray:
        """Counts the answer to a step's decode rows `slots [n]`; the table has their tokens.

        Returns the slots that have reached their limit, in `sampled`, and still decode.
        """
        table = self._table
        self._ahead[slots] -= 1
        slots = slots[table.live[slots]]
        received, ahead = table.received[slots], self._ahead[slots]
        # The last token's KV is computed by the next row.
        most = self._prompt[slots] + received - 1 + self._row_tokens * ahead
        table.computed[slots] = np.minimum(most, self._longest[slots])
        table.sampled[slots] = np.minimum(received + ahead, table.limit[slots])
        return slots[table.decoding[slots] & (table.sampled[slots] >= table.limit[slots])]

    def _after_next_row(self) -> NDArray[np.int32]:
        """The most tokens that slots have computed after one more row, `[slots]`."""
        most: NDArray[np.int32] = np.minimum(
            self._table.computed + np.int32(self._row_tokens), self._longest
        )
        return most
