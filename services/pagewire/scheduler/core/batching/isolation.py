"""Suspects run alone: one that may take workers down, while the others hold still."""

from collections import deque
from collections.abc import Collection

import numpy as np

from pagewire.scheduler.core.batching.decode_list import DecodeList
from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.sequence import Sequence


class Isolation:
    """The admitted suspects of one worker, and whose steps run alone.

    A suspect's steps run alone, one at a time: then nobody else is there when the worker falls.
    """

    __slots__ = ("_decode", "_held", "_suspects", "_table", "alone")

    def __init__(self, table: SlotTable, decode: DecodeList) -> None:
        # The slot of the one whose steps run alone.
        self.alone: int | None = None
        self._table = table
        self._decode = decode
        self._suspects: deque[Sequence] = deque()
        # The slots that wait for it.
        self._held: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def add(self, suspect: Sequence) -> None:
        """A suspect has been admitted."""
        self._suspects.append(suspect)

    @property
    def first_is_done(self) -> bool:
        """Whether the one whose turn it is has left, or has recovered."""
        return bool(self._suspects) and self._is_done_with(self._suspects[0])

    def isolate(self, in_flight: bool, prefilling: Collection[int], stalled: set[int]) -> bool:
        """Leaves one suspect alone on the worker, or nobody if none is left; False to wait.

        `in_flight`: whether steps are. SlotArray that are held leave `stalled`.
        """
        while self.first_is_done:
            self._suspects.popleft()
        slot = self._suspects[0].slot if self._suspects else None
        if slot is not None and in_flight:
            return False
        if slot != self.alone:
            self.alone = slot
            held, self._held = self._held, []
            for other in held:
                if self._table.live[other] and other not in prefilling:
                    self._decode.set(other, True)
            if slot is not None:
                self._hold_others(slot, stalled)
        return True

    def _is_done_with(self, suspect: Sequence) -> bool:
        """Whether a suspect has left, or has recovered and is one no longer."""
        if not self._table.holds(suspect):
            return True
        suspect.suspect = not suspect.recovered(int(self._table.received[suspect.slot]))
        return not suspect.suspect

    def _hold_others(self, slot: int, stalled: set[int]) -> None:
        decoding = np.flatnonzero(self._table.decoding).tolist()
        self._held = [other for other in {*decoding, *stalled} if other != slot]
        for other in self._held:
            stalled.discard(other)
            self._decode.set(other, False)
