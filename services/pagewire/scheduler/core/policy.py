"""Who goes first, and who gives way when memory runs out."""

from collections.abc import Iterable
from typing import Protocol

from pagewire.scheduler.core.sequence import Sequence


class SchedulingPolicy(Protocol):
    """The order of admission and the choice of victim.

    Both must follow one total order, or two sequences could evict each other for ever.
    """

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Sequences with smaller keys are admitted first; distinct for distinct sequences."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence that gives its blocks back; `running` is not empty."""
        ...


class FirstComeFirstServed:
    """In order of arrival; the latest arrival gives way."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of arrival."""
        return (sequence.arrival,)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The latest arrival."""
        return max(running, key=self.key)


class Priority:
    """Smaller `priority` first, then order of arrival; the last in that order gives way."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Priority, then arrival."""
        return (sequence.priority, sequence.arrival)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The lowest priority, of those the latest arrival."""
        return max(running, key=self.key)


POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}
