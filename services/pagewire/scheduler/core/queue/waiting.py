"""The sequences that wait for admission, in the order of a policy."""

import heapq
from collections.abc import Iterator
from itertools import islice

from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence

Entry = tuple[tuple[int, ...], Sequence]


class WaitingQueue:
    """A heap for each group. A removed or parked sequence stays in its heap until it is at the top.

    Invariants: the top of each heap waits and is not parked, so no group is empty. A heap has at
    most 2n + 16 entries while n sequences wait; otherwise, removed sequences behind a head that
    stays would never be freed.
    """

    __slots__ = ("_groups", "_policy", "_waiting", "tokens")

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._groups: dict[str, list[Entry]] = {}
        # By arrival. An entry of a heap is stale (removed or parked) if it is not this very object.
        self._waiting: dict[int, Entry] = {}
        self.tokens = 0  # those of predictions, too: they take as much memory

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences in the order of `push`; they may be removed meanwhile."""
        return iter([sequence for _, sequence in self._waiting.values()])

    def __len__(self) -> int:
        return len(self._waiting)

    def some(self, count: int) -> list[Sequence]:
        """At most `count` waiting sequences, those that were pushed first."""
        return [sequence for _, sequence in islice(self._waiting.values(), count)]

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence that is not in the queue."""
        assert sequence.arrival not in self._waiting, "a sequence is queued twice"
        if self._policy.group(sequence) not in self._groups:
            self._policy.group_waits(sequence)
        self.tokens += sequence.num_sent
        self._insert(sequence)

    def head(self) -> Sequence | None:
        """The first sequence in the policy's order; None when nothing waits."""
        entry = self._head()
        return None if entry is None else entry[1]

    def first(self, count: int) -> list[Sequence]:
        """The first `count` sequences of the head's group, in order; empty if nothing waits."""
        head = self._head()
        if head is None or count == 1:
            return [] if head is None else [head[1]]
        heap = self._groups[self._policy.group(head[1])]
        found: list[Entry] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            if self._waits(entry):
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return [sequence for _, sequence in found]

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence; False if it does not wait."""
        if self._waiting.pop(sequence.arrival, None) is None:
            return False
        self.tokens -= sequence.num_sent
        self._tidy(sequence)
        return True

    def park(self, sequence: Sequence) -> None:
        """Removes a waiting sequence from the order until `unpark`; it still counts as waiting."""
        self._waiting[sequence.arrival] = (self._policy.key(sequence), sequence)
        self._tidy(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Puts a sequence into its place in the order again, if it still waits."""
        if sequence.arrival in self._waiting:
            self._insert(sequence)

    def _insert(self, sequence: Sequence) -> None:
        """Adds an entry to the heap of the sequence's group; an earlier entry becomes stale."""
        entry = (self._policy.key(sequence), sequence)
        self._waiting[sequence.arrival] = entry
        heapq.heappush(self._groups.setdefault(self._policy.group(sequence), []), entry)

    def _tidy(self, sequence: Sequence) -> None:
        """Restores the invariants of a sequence's heap, after its entry has become stale."""
        group = self._policy.group(sequence)
        heap = self._groups.get(group, [])
        while heap and not self._waits(heap[0]):
            heapq.heappop(heap)
        if not heap:
            self._groups.pop(group, None)
        elif len(heap) > 2 * len(self._waiting) + 16:
            heap[:] = [entry for entry in heap if self._waits(entry)]
            heapq.heapify(heap)

    def _head(self) -> Entry | None:
        if len(self._groups) <= 1:
            return next((heap[0] for heap in self._groups.values()), None)
        heads = (heap[0] for heap in self._groups.values())
        return min(heads, key=lambda entry: (self._policy.rank(entry[1]), entry[0]))

    def _waits(self, entry: Entry) -> bool:
        return self._waiting.get(entry[1].arrival) is entry
