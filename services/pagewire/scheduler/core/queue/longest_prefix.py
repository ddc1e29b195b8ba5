"""The policy `longest-prefix`."""

from collections.abc import Callable
from collections.abc import Sequence as Collection

from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence

LOOKAHEAD = 32
MAX_OVERTAKEN = 32


class LongestPrefix(SchedulingPolicy):
    """Of the first LOOKAHEAD arrivals, admits the one with the longest cached prefix.

    To prevent starvation, the oldest is overtaken at most MAX_OVERTAKEN times. Sequences that were
    admitted before come first, in the order of their first admission; the last in it is preempted
    first.
    """

    lookahead = LOOKAHEAD

    def __init__(self) -> None:
        super().__init__()
        self._oldest: Sequence | None = None
        # Admissions since it became the oldest.
        self._overtaken = 0

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of first admission, then of arrival."""
        return (1, sequence.arrival) if sequence.place < 0 else (0, sequence.place)

    def choose(
        self, first: Collection[Sequence], cached_tokens: Callable[[Sequence], int]
    ) -> Sequence:
        """See SchedulingPolicy; among equally long prefixes, the oldest sequence."""
        if first[0] is not self._oldest:
            self._oldest, self._overtaken = first[0], 0
        if first[0].place >= 0 or self._overtaken >= MAX_OVERTAKEN:
            return first[0]
        return max(first, key=cached_tokens)

    def admitted(self, sequence: Sequence) -> None:
        """Counts an admission before the oldest."""
        super().admitted(sequence)
        self._overtaken += 1
