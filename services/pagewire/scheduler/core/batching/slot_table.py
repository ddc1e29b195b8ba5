"""Per-slot state of one worker's running sequences, as a struct of arrays."""

from array import array

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.sequence import Sequence

# Positions in the arrays of a table, as numpy takes them without a conversion.
SlotArray = NDArray[np.intp]

# Outputs lie far apart in memory: they are written for so many steps at once.
STEPS_HELD = 32


class SlotTable:
    """Arrays [num_slots] that a steady decode step touches with a few vectorized operations.

    `computed`: tokens whose KV exists once every step sent so far has run; `capacity`: tokens
    that the slot's blocks hold; `known`: tokens known at the start; `sampled`: output tokens drawn
    once every step sent so far has run; `received`: output tokens known here; `limit`: output
    tokens at which the sequence ends.
    Invariant of a live slot: received <= sampled <= limit, computed <= capacity.
    """

    __slots__ = (
        "_appended",
        "_output",
        "_stoppers",
        "capacity",
        "computed",
        "decoding",
        "known",
        "last_step",
        "limit",
        "live",
        "received",
        "sampled",
        "sequences",
    )

    def __init__(self, num_slots: int) -> None:
        def column() -> Int32Array:
            return np.zeros(num_slots, dtype=np.int32)

        self.computed = column()
        self.capacity = column()
        self.known = column()
        self.sampled = column()
        self.received = column()
        self.limit = column()
        # The last step that names a slot; while it decodes nobody asks, so it is set afterwards.
        self.last_step = np.zeros(num_slots, dtype=np.int64)
        # A slot is live from admission until its sequence ends; a dead one may still be named
        # by steps in flight, whose tokens are dropped.
        self.live = np.zeros(num_slots, dtype=bool)
        self.decoding = np.zeros(num_slots, dtype=bool)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._output = np.zeros((num_slots, 256), dtype=np.int32)
        # SlotArray, indices and tokens that are not in the outputs yet.
        self._appended: list[tuple[SlotArray, Int32Array, Int32Array]] = []
        # How many sequences each token id stops; the last entry, 0, is for all ids from there on.
        self._stoppers = np.zeros(1, dtype=np.int32)

    def occupy(self, slot: int, sequence: Sequence, capacity: int) -> None:
        """A sequence takes a slot; of its tokens `num_computed` are cached."""
        generated = len(sequence.output)
        self.sequences[slot] = sequence
        self.computed[slot] = sequence.num_computed
        self.capacity[slot] = capacity
        self.known[slot] = sequence.num_known
        self.sampled[slot] = self.received[slot] = generated
        self.limit[slot] = sequence.max_tokens
        self.live[slot] = True
        self._count_stoppers(sequence, 1)
        self._reserve(generated)
        self._output[slot, :generated] = sequence.output

    def vacate(self, slot: int) -> None:
        """The sequence leaves the slot and takes its output along."""
        sequence = self.sequence(slot)
        self._write_out()
        sequence.output = array("i", self._output[slot, : self.received[slot]].tobytes())
        self._count_stoppers(sequence, -1)
        self.sequences[slot] = None
        self.live[slot] = self.decoding[slot] = False

    def sequence(self, slot: int) -> Sequence:
        """The sequence in a live slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence is in one of the slots; it may be in one of another worker's."""
        slot = sequence.slot
        return 0 <= slot < len(self.sequences) and self.sequences[slot] is sequence

    def append(self, slots: SlotArray, tokens: Int32Array) -> Int32Array:
        """Adds one token to each of distinct slots [n]; the index of each in its output."""
        indices = self.received[slots]
        self.received[slots] = indices + 1
        self._appended.append((slots, indices, tokens))
        if len(self._appended) == STEPS_HELD:
            self._write_out()
        return indices

    def full(self, slots: SlotArray) -> list[int]:
        """The rows of `slots` whose outputs are as long as they may be."""
        return (self.received[slots] >= self.limit[slots]).nonzero()[0].tolist()

    def stopped(self, slots: SlotArray, tokens: Int32Array) -> list[int]:
        """The rows of live slots [n] that end by the token that each has got, a stop id of it."""
        rows = self._stoppers.take(tokens, mode="clip").nonzero()[0].tolist()
        return [row for row in rows if int(tokens[row]) in self.sequence(slots[row]).stop_ids]

    def _count_stoppers(self, sequence: Sequence, change: int) -> None:
        ids = sorted({token for token in sequence.stop_ids if token >= 0})
        if ids and ids[-1] >= len(self._stoppers) - 1:
            grown = np.zeros(ids[-1] + 2, dtype=np.int32)
            grown[: len(self._stoppers)] = self._stoppers
            self._stoppers = grown
        self._stoppers[ids] += change

    def _write_out(self) -> None:
        """Brings the outputs up to date."""
        self._reserve(int(self.received.max()))
        for slots, indices, tokens in self._appended:
            self._output[slots, indices] = tokens
        self._appended.clear()

    def _reserve(self, length: int) -> None:
        """Grows the output buffer to hold `length` tokens a slot."""
        rows, width = self._output.shape
        if length > width:
            grown = np.zeros((rows, max(length, 2 * width)), dtype=np.int32)
            grown[:, :width] = self._output
            self._output = grown
