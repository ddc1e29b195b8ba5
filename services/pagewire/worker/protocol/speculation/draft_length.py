"""How many drafts a sequence gets in its next step, by what became of the earlier ones."""

# A sequence whose drafts are wrong pauses for so many steps, twice as many each time.
FIRST_PAUSE = 4
LONGEST_PAUSE = 64


class DraftLength:
    """The draft length of one sequence: it doubles while all drafts are right.

    It falls to what was right otherwise, and to none for some steps if nothing was.
    """

    __slots__ = ("_length", "_most", "_next_pause", "_pause")

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(2, most)
        self._pause = 0
        self._next_pause = FIRST_PAUSE

    def next(self) -> int:
        """The most drafts of the next step; to be called once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of a step, at least 1, `accepted` were right."""
        if accepted == drafted:
            self._length = min(self._most, 2 * max(self._length, 1))
            self._next_pause = FIRST_PAUSE
        elif accepted:
            self._length = min(self._most, accepted + 1)
            self._next_pause = FIRST_PAUSE
        else:
            self._length = 1
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
