"""The sequences that wait for admission, in the order of a policy."""

import heapq

from pagewire.scheduler.core.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence


class WaitingQueue:
    """A heap with lazy removal: a removed sequence is skipped when it comes to the top."""

    __slots__ = ("_heap", "_policy", "_waiting", "tokens")

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []
        self._waiting: set[int] = set()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence that is not in the queue."""
        assert sequence.arrival not in self._waiting, "a sequence is queued twice"
        self._waiting.add(sequence.arrival)
        self.tokens += sequence.num_known
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence))

    def head(self) -> Sequence | None:
        """The sequence to be admitted next; None when nothing waits."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.arrival in self._waiting:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out; False if it was not waiting."""
        if sequence.arrival not in self._waiting:
            return False
        self._waiting.remove(sequence.arrival)
        self.tokens -= sequence.num_known
        if self._heap and self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
        return True
