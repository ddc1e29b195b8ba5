"""Detection of something that no longer makes progress."""


class StallDetector:
    """Polls a number that grows with progress.

    It counts polls without progress instead of seconds. A process that was paused has also polled
    less often, so it does not report its own pause as a stall of its peers.
    """

    __slots__ = ("_idle_polls", "_last", "_max_idle_polls")

    def __init__(self, max_idle_polls: int) -> None:
        """Stalled means: no progress in this many polls in a row."""
        self._max_idle_polls = max_idle_polls
        self._idle_polls = 0
        self._last: int | None = None

    def poll(self, progress: int, busy: bool = True) -> bool:
        """Whether it has stalled. Polls while there is nothing to do (`busy` False) do not
        count."""
        self._idle_polls = self._idle_polls + 1 if busy and progress == self._last else 0
        self._last = progress
        return self._idle_polls >= self._max_idle_polls
