"""How schedulers share workers without a coordinator: which ones to claim, and which to give up.

Every worker reports which scheduler holds it and which ones wait for it. From these reports alone,
each scheduler computes how many workers every scheduler should hold. The rule is the same for all,
so schedulers with the same reports compute the same numbers. These differ by one at most.

- A scheduler that holds too few claims free workers at once. The first claim of a worker wins.
- A scheduler that holds too many gives some up, for waiting schedulers that hold too few. It does
  so only once no scheduler and no worker has joined or left for a while.
- Where a scheduler does not reach every worker, the numbers may not fit. A worker that stays free
  is claimed in the end by a scheduler that waits for it, the one with the fewest workers first.
  The worker stays there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

# At most this part of a scheduler's workers is given up at a time, but always one.
GIVEN_UP_AT_A_TIME = 4
# A worker that no scheduler claims by its share is claimed after this many settling times, plus one
# for each waiting scheduler that holds fewer workers.
LEFT_OVER_AFTER = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """The scheduler that holds a worker, empty for none, and those that wait for it."""

    holder: str
    waiting: frozenset[str] = frozenset()

    @property
    def schedulers(self) -> frozenset[str]:
        """All schedulers that hold the worker or wait for it."""
        return self.waiting | {self.holder} if self.holder else self.waiting


@dataclass(frozen=True, slots=True)
class Moves:
    """Workers to claim and to give up now.

    `again_in`: seconds after which to plan again if nothing happens before; None for never.
    """

    claims: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    again_in: float | None = None


def fair_shares(held: dict[str, int], num_workers: int) -> dict[str, int]:
    """The number of workers that each scheduler should hold, from the numbers it holds now.

    The remainder goes to those that hold the most, then by name, so that the fewest workers move.
    Schedulers that hold less than an equal part count as equal, because reports of their claims may
    be on the way: else two could find that they hold the most, and claim the same remainder.
    """
    each, rest = divmod(num_workers, len(held))
    ranked = sorted(held, key=lambda name: (-max(held[name], each), name))
    return {name: each + (rank < rest) for rank, name in enumerate(ranked)}


class Sharing:
    """One scheduler's view of the workers that it shares with others."""

    def __init__(self, name: str, settle_seconds: float) -> None:
        """`name` is this scheduler's. It gives up a worker only after `settle_seconds` without a
        change of membership."""
        self.name = name
        self._settle = settle_seconds
        self._standings: dict[str, Standing] = {}
        self._free_since: dict[str, float] = {}
        self._claimed: set[str] = set()
        self._releasing: set[str] = set()
        # Claimed beyond its share; kept until a scheduler or worker joins or leaves.
        self._left_over: set[str] = set()
        # The number of workers that report each scheduler.
        self._seen: Counter[str] = Counter()
        self._changed_at = -settle_seconds

    def update(self, worker: str, standing: Standing | None, now: float) -> None:
        """Takes a worker's report; None if the worker is not reachable any more."""
        before = self._standings.pop(worker, None)
        if (before is None) != (standing is None):
            self._membership_changed(now)
        old = before.schedulers if before else frozenset()
        new = standing.schedulers if standing else frozenset()
        for scheduler in new - old:
            self._count(scheduler, 1, now)
        for scheduler in old - new:
            self._count(scheduler, -1, now)
        if standing is not None:
            self._standings[worker] = standing
        if standing is None or standing.holder:
            self._free_since.pop(worker, None)
            self._claimed.discard(worker)
        else:
            self._free_since.setdefault(worker, now)
        if standing is None or standing.holder != self.name:
            self._releasing.discard(worker)

    def refused(self, worker: str) -> None:
        """Notes that a claim came too late."""
        self._claimed.discard(worker)
        self._left_over.discard(worker)

    def plan(self, now: float, load: Callable[[str], int]) -> Moves:
        """The moves to make now; `load` returns how much runs on a worker of this scheduler.

        Claims and releases count as under way until `update` or `refused` reports their result.
        """
        held = self.held()
        shares = fair_shares(held, len(self._standings))
        room = shares[self.name] - held[self.name]
        # Also without room: a worker may be left that no other scheduler reaches.
        claims, again_in = self._claims(room, held, now)
        if room >= 0:
            return Moves(claims=claims, again_in=again_in)
        wait = self._changed_at + self._settle - now
        if wait > 0:
            return Moves(claims=claims, again_in=wait if again_in is None else min(wait, again_in))
        releases = self._releases(-room, held, shares, load)
        return Moves(claims=claims, releases=releases, again_in=again_in)

    def held(self) -> dict[str, int]:
        """The number of workers that each known scheduler holds, this one included."""
        held = dict.fromkeys([self.name, *self._seen], 0)
        for standing in self._standings.values():
            if standing.holder:
                held[standing.holder] += 1
        return held

    def _count(self, scheduler: str, change: int, now: float) -> None:
        before = self._seen[scheduler]
        self._seen[scheduler] += change
        if not self._seen[scheduler]:
            del self._seen[scheduler]
        if scheduler != self.name and (not before or not before + change):
            self._membership_changed(now)

    def _membership_changed(self, now: float) -> None:
        self._changed_at = now
        self._left_over.clear()

    def _claims(
        self, room: int, held: dict[str, int], now: float
    ) -> tuple[tuple[str, ...], float | None]:
        free = sorted(self._free_since.keys() - self._claimed, key=self._preference)
        chosen = free[: max(0, room - len(self._claimed))]
        left_over, again_in = None, None
        for worker in free[len(chosen) :]:
            patience = (LEFT_OVER_AFTER + self._rank(worker, held)) * self._settle
            wait = self._free_since[worker] + patience - now
            if wait > 0:
                again_in = wait if again_in is None else min(again_in, wait)
            elif left_over is None:
                left_over = worker
        claims = tuple(chosen)
        if left_over is not None:
            self._left_over.add(left_over)
            claims = (*claims, left_over)
        self._claimed.update(claims)
        return claims, again_in

    def _rank(self, worker: str, held: dict[str, int]) -> int:
        """The number of schedulers that wait for a worker and hold fewer workers."""
        mine = (held[self.name], self.name)
        return sum((held[name], name) < mine for name in self._standings[worker].waiting)

    def _releases(
        self,
        excess: int,
        held: dict[str, int],
        shares: dict[str, int],
        load: Callable[[str], int],
    ) -> tuple[str, ...]:
        wanting = {name for name, count in held.items() if count < shares[name]}
        at_once = max(1, held[self.name] // GIVEN_UP_AT_A_TIME)
        room = min(excess - len(self._left_over), at_once) - len(self._releasing)
        able = [
            worker
            for worker, standing in self._standings.items()
            if standing.holder == self.name
            and worker not in self._releasing | self._left_over
            and standing.waiting & wanting
        ]
        able.sort(key=lambda worker: (load(worker), worker))
        chosen = tuple(able[: max(0, room)])
        self._releasing.update(chosen)
        return chosen

    def _preference(self, worker: str) -> bytes:
        """Schedulers claim in different orders, so that few claims come too late."""
        return blake2b(f"{self.name} {worker}".encode(), digest_size=8).digest()
