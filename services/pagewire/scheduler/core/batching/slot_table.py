"""The state of each slot of one worker, as a struct of arrays."""

from array import array

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.sequence import Sequence

# Slot numbers, which numpy accepts as indices without a conversion.
SlotArray = NDArray[np.intp]

# Rows of the output buffer are far apart in memory, so the tokens of this many steps are written to
# it at once.
STEPS_HELD = 32


class SlotTable:
    """Arrays [num_slots], which a decode step updates with a few vectorized operations.

    - `computed`: tokens whose KV exists after all steps sent so far
    - `capacity`: tokens that the slot's blocks hold
    - `known`: tokens known at the start
    - `sampled`: output tokens drawn after all steps sent so far
    - `received`: output tokens known here
    - `limit`: output tokens at which the sequence ends

    Invariants of a live slot: received <= sampled <= limit, computed <= capacity.
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
        # The last step that names a slot. It is not kept up to date while the slot decodes.
        self.last_step = np.zeros(num_slots, dtype=np.int64)
        # A slot is live from admission until its sequence ends. Steps in flight may name it after
        # that; their tokens for it are dropped.
        self.live = np.zeros(num_slots, dtype=bool)
        self.decoding = np.zeros(num_slots, dtype=bool)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._output = np.zeros((num_slots, 256), dtype=np.int32)
        # Slots, indices and tokens of each step that is not in the output buffer yet.
        self._appended: list[tuple[SlotArray, Int32Array, Int32Array]] = []
        # How many sequences each token id stops. The last entry, 0, serves all larger ids.
        self._stoppers = np.zeros(1, dtype=np.int32)

    def occupy(self, slot: int, sequence: Sequence, capacity: int) -> None:
        """Puts a sequence into a slot, with blocks for `capacity` tokens."""
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
        """Takes the sequence out of a slot, and brings its `output` up to date."""
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
        """Whether a sequence is in a slot of this table; it may be in another worker's."""
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
        """The rows of `slots` whose outputs have reached their limit."""
        return (self.received[slots] >= self.limit[slots]).nonzero()[0].tolist()

    def stopped(self, slots: SlotArray, tokens: Int32Array) -> list[int]:
        """The rows of live slots [n] whose new token is one of the sequence's stop ids."""
        rows = self._stoppers.take(tokens, mode="clip").nonzero()[0].tolist()
        return [row for row in rows if int(tokens[row]) in self.sequence(slots[row]).stop_ids]

    def check(self, block_size: int) -> None:
        """Asserts the invariants."""
        for slot in np.flatnonzero(self.live).tolist():
            assert self.received[slot] <= self.sampled[slot] <= self.limit[slot]
            assert self.computed[slot] <= self.capacity[slot]
            sequence = self.sequence(slot)
            assert self.capacity[slot] == len(sequence.blocks) * block_size
            assert not any(sequence.blocks[: sequence.num_freed]), "a freed block is named"
            assert 0 not in sequence.held, "the scratch block is held"

    def _count_stoppers(self, sequence: Sequence, change: int) -> None:
        ids = sorted({token for token in sequence.stop_ids if token >= 0})
        if ids and ids[-1] >= len(self._stoppers) - 1:
            grown = np.zeros(ids[-1] + 2, dtype=np.int32)
            grown[: len(self._stoppers)] = self._stoppers
            self._stoppers = grown
        self._stoppers[ids] += change

    def _write_out(self) -> None:
        """Writes the tokens received so far to the output buffer."""
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
