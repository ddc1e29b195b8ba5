"""Scheduling policies: the order of admission, and which sequence is preempted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Collection

from pagewire.scheduler.core.sequence import Sequence


class SchedulingPolicy(ABC):
    """The order of admission, and the choice of the sequence to preempt.

    Both follow one total order, (rank, key); otherwise two sequences could preempt each other
    without end. Invariant: the order of sequences that were admitted before never changes. So a
    policy whose order changes puts those first, in the order of their first admission (`place`). To
    prevent starvation, every waiting sequence must come first at some time.

    A policy must define `key`. The other methods are for orders that change while sequences wait.
    """

    # The number of sequences, from the first in the order, that `choose` gets.
    lookahead = 1
    # Whether requests may set `priority`; otherwise it is refused, as it would have no effect.
    uses_priority = False

    def __init__(self) -> None:
        self._places = 0

    @abstractmethod
    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Smaller keys come first. A sequence's key is unique, and fixed while it waits or runs."""

    def group(self, sequence: Sequence) -> str:
        """Sequences of one group wait in one queue; only the first of each is compared by rank."""
        return ""

    def rank(self, sequence: Sequence) -> int:
        """Compared before the key, between the first sequences of all groups, at each admission."""
        return 0

    def choose(
        self, first: Collection[Sequence], cached_tokens: Callable[[Sequence], int]
    ) -> Sequence:
        """The sequence to admit next, of the `lookahead` first ones in the order.

        `cached_tokens` returns how many first tokens of a sequence some worker has cached.
        """
        return first[0]

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt: the last in the order."""
        return max(running, key=lambda sequence: (self.rank(sequence), self.key(sequence)))

    # Events, for policies that keep counts.

    def group_waits(self, sequence: Sequence) -> None:
        """A sequence is queued, and no other of its group waits."""
        return

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has taken a slot; its `num_computed` tokens were cached."""
        if sequence.place < 0:
            sequence.place = self._places
            self._places += 1

    def left(self, sequence: Sequence) -> None:
        """A sequence has left its slot, and its `output` is complete; it may be queued again."""
        return


class FirstComeFirstServed(SchedulingPolicy):
    """In order of arrival; the latest arrival is preempted first."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of arrival."""
        return (sequence.arrival,)


class Priority(SchedulingPolicy):
    """Smaller `priority` first, then order of arrival; the last one is preempted first."""

    uses_priority = True

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Priority, then arrival."""
        return (sequence.priority, sequence.arrival)


class Deadline(SchedulingPolicy):
    """Earliest deadline first, then order of arrival.

    No sequence starves: those that arrive late enough have later deadlines.
    """

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Deadline, then arrival."""
        return (sequence.deadline, sequence.arrival)
