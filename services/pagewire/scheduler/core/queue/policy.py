"""Who goes first, and who gives way when memory runs out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Collection

from pagewire.scheduler.core.sequence import Sequence


class SchedulingPolicy(ABC):
    """The order of admission and the choice of victim.

    Both follow one total order, (rank, key), or two sequences could evict each other for ever.
    Among sequences that were admitted once that order must never change; a policy whose order
    does change therefore keeps them in the order of their first admission (`place`), before all
    that were never admitted. To starve nobody, what waits must come first at some time.

    Only `key` must be given. The rest is for orders that change while sequences wait.
    """

    # How many of the first in the order `choose` looks at.
    lookahead = 1
    # Whether requests may have a `priority`, which is refused where it would do nothing.
    uses_priority = False

    def __init__(self) -> None:
        self._places = 0

    @abstractmethod
    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Smaller keys go first; distinct for distinct sequences, fixed while one waits or runs."""

    def group(self, sequence: Sequence) -> str:
        """Sequences of one group wait in one line; only the first of each line is compared."""
        return ""

    def rank(self, sequence: Sequence) -> int:
        """Goes before the key between the first of each group; asked anew for each admission."""
        return 0

    def choose(
        self, first: Collection[Sequence], cached_tokens: Callable[[Sequence], int]
    ) -> Sequence:
        """Who is admitted next, of the `lookahead` first in the order.

        `cached_tokens` says how many tokens of a sequence are in the cache of some worker.
        """
        return first[0]

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence that gives its blocks back; `running` is not empty."""
        return max(running, key=lambda sequence: (self.rank(sequence), self.key(sequence)))

    # What happens, for policies that keep count.

    def woken(self, sequence: Sequence) -> None:
        """A sequence is queued, and no other of its group waits."""
        return

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has taken a slot; it knows how many of its tokens were cached."""
        if sequence.place < 0:
            sequence.place = self._places
            self._places += 1

    def left(self, sequence: Sequence) -> None:
        """A sequence has left its slot, with its output; it may be queued again."""
        return


class FirstComeFirstServed(SchedulingPolicy):
    """In order of arrival; the latest arrival gives way."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of arrival."""
        return (sequence.arrival,)


class Priority(SchedulingPolicy):
    """Smaller `priority` first, then order of arrival; the last in that order gives way."""

    uses_priority = True

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Priority, then arrival."""
        return (sequence.priority, sequence.arrival)


class Deadline(SchedulingPolicy):
    """Earliest deadline first, then order of arrival.

    Nobody starves, because later arrivals have later deadlines, if only those are far enough.
    """

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Deadline, then arrival."""
        return (sequence.deadline, sequence.arrival)
