"""The policy `longest-prefix`."""

from collections.abc import Callable
from collections.abc import Sequence as Collection

from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence

LOOKAHEAD = 32
PATIENCE = 32


class LongestPrefix(SchedulingPolicy):
    """Of the first LOOKAHEAD arrivals the one with the longest cached prefix goes first.

    Nobody starves: the oldest is passed over at most PATIENCE times. Who was admitted once goes
    before all others, in the order of first admission, and the last in that order gives way.
    """

    lookahead = LOOKAHEAD

    def __init__(self) -> None:
        super().__init__()
        self._oldest: Sequence | None = None
        self._passed = 0

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of first admission, then of arrival."""
        return (1, sequence.arrival) if sequence.place < 0 else (0, sequence.place)

    def choose(
        self, first: Collection[Sequence], cached_tokens: Callable[[Sequence], int]
    ) -> Sequence:
        """See SchedulingPolicy; of equally long prefixes the oldest."""
        if first[0] is not self._oldest:
            self._oldest, self._passed = first[0], 0
        if first[0].place >= 0 or self._passed >= PATIENCE:
            return first[0]
        return max(first, key=cached_tokens)

    def admitted(self, sequence: Sequence) -> None:
        """Counts who overtakes the oldest."""
        super().admitted(sequence)
        self._passed += 1
