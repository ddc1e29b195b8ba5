"""How schedulers share workers without a coordinator: which ones to claim, and which to give up.

Each scheduler hears from every worker who holds it and who waits for it. From that alone each
computes how many workers every scheduler should hold, with the same rule. All that hear the same
come to the same numbers, and these differ by one at most.

- A scheduler that holds too few claims free workers, at once. The first claim of a worker wins.
- One that holds too many gives some up, for schedulers that hold too few and wait for them. It does
  so only once no scheduler and no worker has come or gone for a while.
- Where a scheduler does not reach every worker, the numbers may not fit. A worker that stays free
  is claimed in the end by one that waits for it, those with the fewest first. It stays there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

# At most this part of a scheduler's workers is given up at a time, but always one.
GIVEN_UP_AT_A_TIME = 4
# A worker that no scheduler claims by its share is claimed after so many times the settling time,
# and once more for each scheduler that holds fewer.
LEFT_OVER_AFTER = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """Who holds a worker, empty for none, and who waits for it."""

    holder: str
    waiting: frozenset[str] = frozenset()

    @property
    def schedulers(self) -> frozenset[str]:
        """Everyone who has or wants the worker."""
        return self.waiting | {self.holder} if self.holder else self.waiting


@dataclass(frozen=True, slots=True)
class Moves:
    """Workers to claim and to give up now, and the seconds after which to ask again if nothing
    happens before; None: no time will change the answer."""

    claims: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    again_in: float | None = None


def fair_shares(held: dict[str, int], num_workers: int) -> dict[str, int]:
    """How many of the workers each scheduler should hold, by how many it holds now.

    The remainder goes to those that hold the most, then by name: so the fewest workers move.
    """
    each, rest = divmod(num_workers, len(held))
    ranked = sorted(held, key=lambda name: (-held[name], name))
    return {name: each + (rank < rest) for rank, name in enumerate(ranked)}


class Sharing:
    """One scheduler's view of the workers that it shares with others."""

    def __init__(self, name: str, settle_seconds: float) -> None:
        """`name` is this scheduler's. It gives nothing up before membership has been the same for
        `settle_seconds`."""
        self.name = name
        self._settle = settle_seconds
        self._standings: dict[str, Standing] = {}
        self._free_since: dict[str, float] = {}
        self._claimed: set[str] = set()
        self._releasing: set[str] = set()
        # Claimed beyond its share; kept until a scheduler or worker comes or goes.
        self._left_over: set[str] = set()
        # At how many workers each scheduler was seen.
        self._seen: Counter[str] = Counter()
        self._changed_at = -settle_seconds

    def update(self, worker: str, standing: Standing | None, now: float) -> None:
        """A worker has said who holds it, or is not reachable any more (None)."""
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
        """A claim came too late."""
        self._claimed.discard(worker)
        self._left_over.discard(worker)

    def plan(self, now: float, load: Callable[[str], int]) -> Moves:
        """What to do now; `load` is how much runs on a worker that this scheduler holds.

        Claims and releases count as under way until `update` or `refused` says how they ended.
        """
        held = self.held()
        shares = fair_shares(held, len(self._standings))
        room = shares[self.name] - held[self.name]
        if room >= 0:
            claims, again_in = self._claims(room, held, now)
            return Moves(claims=claims, again_in=again_in)
        wait = self._changed_at + self._settle - now
        if wait > 0:
            return Moves(again_in=wait)
        return Moves(releases=self._releases(-room, held, shares, load))

    def held(self) -> dict[str, int]:
        """How many workers each scheduler holds that is known, this one included."""
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
        """How many that wait for a worker hold fewer workers, as far as this scheduler knows."""
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
