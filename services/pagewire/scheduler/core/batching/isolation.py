"""Isolation: the steps of a suspect run alone, to tell whether it takes workers down."""

from collections import deque
from collections.abc import Collection

import numpy as np

from pagewire.scheduler.core.batching.decode_list import DecodeList
from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.sequence import Sequence


class Isolation:
    """The admitted suspects of one worker. They run one at a time, with no other sequence beside.

    A suspect has one step in flight at a time, and other sequences none.
    """

    __slots__ = ("_decode", "_paused", "_suspects", "_table", "alone")

    def __init__(self, table: SlotTable, decode: DecodeList) -> None:
        # The slot whose steps run alone.
        self.alone: int | None = None
        self._table = table
        self._decode = decode
        self._suspects: deque[Sequence] = deque()
        # Slots that would decode if no slot ran alone.
        self._paused: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def add(self, suspect: Sequence) -> None:
        """Adds a suspect that was admitted."""
        self._suspects.append(suspect)

    @property
    def first_is_done(self) -> bool:
        """Whether the suspect that runs alone has left the worker or recovered."""
        return bool(self._suspects) and self._is_done(self._suspects[0])

    def isolate(
        self, steps_in_flight: bool, prefilling: Collection[int], stalled: set[int]
    ) -> bool:
        """Pauses all slots but the first suspect's, or resumes them if no suspect is left.

        Returns False while the steps in flight must be answered first. Paused slots are removed
        from `stalled`.
        """
        while self.first_is_done:
            self._suspects.popleft()
        slot = self._suspects[0].slot if self._suspects else None
        if slot is not None and steps_in_flight:
            return False
        if slot != self.alone:
            self.alone = slot
            self._resume(prefilling)
            if slot is not None:
                self._pause_others(slot, stalled)
        return True

    def _is_done(self, suspect: Sequence) -> bool:
        if not self._table.holds(suspect):
            return True
        suspect.suspect = not suspect.recovered(int(self._table.received[suspect.slot]))
        return not suspect.suspect

    def _resume(self, prefilling: Collection[int]) -> None:
        paused, self._paused = self._paused, []
        for slot in paused:
            if self._table.live[slot] and slot not in prefilling:
                self._decode.set(slot, True)

    def _pause_others(self, alone: int, stalled: set[int]) -> None:
        decoding = np.flatnonzero(self._table.decoding).tolist()
        self._paused = [slot for slot in {*decoding, *stalled} if slot != alone]
        for slot in self._paused:
            stalled.discard(slot)
            self._decode.set(slot, False)
