"""Schedulers that share workers: each worker ends with one scheduler, shares differ by one at most,
and no worker moves without a reason, after any changes."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from pagewire.scheduler.core.sharing import Sharing, Standing, fair_shares

SETTLE = 5.0
TICK = 0.5


@dataclass
class Worker:
    holder: str = ""
    waiting: set[str] = field(default_factory=set)


class Fleet:
    """Schedulers and workers; messages of workers arrive after a random time, in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.schedulers: dict[str, Sharing] = {}
        # By scheduler and worker: arrival times and messages.
        self.news: dict[tuple[str, str], deque[tuple[float, Standing | None]]] = {}
        self.moves = 0
        self.unreachable: set[tuple[str, str]] = set()

    def reaches(self, scheduler: str, worker: str) -> bool:
        return (scheduler, worker) not in self.unreachable

    def add_scheduler(self, name: str) -> None:
        self.schedulers[name] = Sharing(name, SETTLE)
        for worker in self.workers:
            if self.reaches(name, worker):
                self.workers[worker].waiting.add(name)
                self.tell(worker)

    def end_scheduler(self, name: str) -> None:
        del self.schedulers[name]
        for worker, state in self.workers.items():
            state.waiting.discard(name)
            if state.holder == name:
                state.holder = ""
            self.tell(worker)

    def add_worker(self, name: str) -> None:
        reached = {scheduler for scheduler in self.schedulers if self.reaches(scheduler, name)}
        self.workers[name] = Worker(waiting=reached)
        self.tell(name)

    def end_worker(self, name: str) -> None:
        del self.workers[name]
        for scheduler in self.schedulers:
            if self.reaches(scheduler, name):
                self.send(scheduler, name, None)

    def tell(self, worker: str) -> None:
        state = self.workers[worker]
        for scheduler in self.schedulers:
            if self.reaches(scheduler, worker):
                waiting = frozenset(state.waiting - {state.holder})
                self.send(scheduler, worker, Standing(state.holder, waiting))

    def send(self, scheduler: str, worker: str, standing: Standing | None) -> None:
        queue = self.news.setdefault((scheduler, worker), deque())
        last = queue[-1][0] if queue else self.now
        queue.append((max(last, self.now + self.random.choice([0, 0.1, 1.0])), standing))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for (name, worker), queue in list(self.news.items()):
                while queue and queue[0][0] <= self.now:
                    _, standing = queue.popleft()
                    if name in self.schedulers:
                        self.schedulers[name].update(worker, standing, self.now)
            for name in self.random.sample(sorted(self.schedulers), len(self.schedulers)):
                self.act(name)

    def act(self, name: str) -> None:
        sharing = self.schedulers[name]
        moves = sharing.plan(self.now, lambda worker: 0)
        for worker in moves.claims:
            state = self.workers.get(worker)
            if state is None:
                continue
            if state.holder:
                sharing.refused(worker)
                continue
            state.holder = name
            state.waiting.discard(name)
            self.tell(worker)
        for worker in moves.releases:
            state = self.workers.get(worker)
            if state is not None and state.holder == name:
                self.moves += 1
                state.holder = ""
                state.waiting.add(name)
                self.tell(worker)

    def held(self) -> Counter[str]:
        held = Counter(dict.fromkeys(self.schedulers, 0))
        held.update(state.holder for state in self.workers.values())
        return held


changes = st.lists(
    st.tuples(
        st.sampled_from(["add scheduler", "end scheduler", "add worker", "end worker"]),
        st.integers(0, 4),
        st.sampled_from([0.5, 2.0, 12.0]),
    ),
    max_size=25,
)


def play(fleet: Fleet, history: list[tuple[str, int, float]]) -> None:
    """Applies changes; a scheduler or worker that returns is a new process."""
    for number, (change, which, pause) in enumerate(history):
        names = sorted(fleet.schedulers if "scheduler" in change else fleet.workers)
        if change == "add scheduler" and len(names) < 5:
            fleet.add_scheduler(f"scheduler-{number}")
        elif change == "end scheduler" and names:
            fleet.end_scheduler(names[which % len(names)])
        elif change == "add worker":
            fleet.add_worker(f"worker-{number}")
        elif change == "end worker" and names:
            fleet.end_worker(names[which % len(names)])
        fleet.run(pause)


@given(history=changes, workers=st.integers(1, 20), seed=st.integers(0, 2**16))
def test_every_worker_ends_with_one_scheduler_and_shares_are_even(
    history: list[tuple[str, int, float]], workers: int, seed: int
) -> None:
    fleet = Fleet(seed)
    for number in range(workers):
        fleet.add_worker(f"first-{number}")
    play(fleet, history)
    fleet.add_scheduler("last")
    fleet.run(SETTLE + 60)
    held = fleet.held()
    assert "" not in held, "a worker is free"
    assert held.keys() <= fleet.schedulers.keys()
    assert max(held.values()) - min(held.values()) <= 1
    moves = fleet.moves
    fleet.run(60)
    assert fleet.moves == moves, "shares that are even do not move"
    assert fleet.held() == held


def settled_fleet(workers: int, schedulers: int, seed: int) -> Fleet:
    """A fleet whose shares are even."""
    fleet = Fleet(seed)
    for number in range(schedulers):
        fleet.add_scheduler(f"scheduler-{number}")
    for number in range(workers):
        fleet.add_worker(f"worker-{number}")
    fleet.run(SETTLE + 60)
    return fleet


@given(workers=st.integers(1, 40), schedulers=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_a_new_scheduler_gets_its_share_by_few_moves(
    workers: int, schedulers: int, seed: int
) -> None:
    fleet = settled_fleet(workers, schedulers, seed)
    before = fleet.moves
    fleet.add_scheduler("new")
    fleet.run(SETTLE - 1)
    assert fleet.moves == before, "nothing moves before membership is stable"
    fleet.run(60)
    share = workers // (schedulers + 1)
    assert share <= fleet.held()["new"] <= share + 1
    # Each may release one for the remainder, on old counts of the others' workers.
    assert share <= fleet.moves - before <= share + schedulers


@given(workers=st.integers(1, 40), schedulers=st.integers(2, 6), seed=st.integers(0, 2**16))
# By old reports, two schedulers hold the most of all.
@example(workers=28, schedulers=4, seed=15523)
def test_workers_of_a_dead_scheduler_are_taken_over_at_once_and_no_other_moves(
    workers: int, schedulers: int, seed: int
) -> None:
    fleet = settled_fleet(workers, schedulers, seed)
    kept = {name: state.holder for name, state in fleet.workers.items()}
    before = fleet.moves
    fleet.end_scheduler("scheduler-0")
    fleet.run(4)
    assert all(state.holder for state in fleet.workers.values())
    fleet.run(60)
    assert fleet.moves == before
    for name, state in fleet.workers.items():
        assert state.holder == kept[name] or kept[name] == "scheduler-0"


@given(
    holes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=40),
    seed=st.integers(0, 2**16),
)
# One scheduler alone reaches two workers: it claims the second while it has more than its share.
@example(holes=[(0, 0), (0, 7), (2, 0), (2, 7), (3, 0), (3, 7)], seed=0)
def test_each_worker_is_used_where_not_every_scheduler_reaches_it(
    holes: list[tuple[int, int]], seed: int
) -> None:
    fleet = Fleet(seed)
    fleet.unreachable = {(f"scheduler-{s}", f"worker-{w}") for s, w in holes}
    for number in range(4):
        fleet.add_scheduler(f"scheduler-{number}")
    for number in range(12):
        fleet.add_worker(f"worker-{number}")
    fleet.run(SETTLE + 90)
    for worker, state in fleet.workers.items():
        reaching = [name for name in fleet.schedulers if fleet.reaches(name, worker)]
        assert bool(state.holder) == bool(reaching), f"{worker} is left alone"
    moves = fleet.moves
    fleet.run(60)
    assert fleet.moves == moves, "no flapping"


def test_the_remainder_goes_to_those_that_hold_the_most() -> None:
    assert fair_shares({"a": 0, "b": 3, "c": 0}, 4) == {"a": 1, "b": 2, "c": 1}
    assert fair_shares({"a": 0, "b": 0}, 1) == {"a": 1, "b": 0}


def test_old_reports_of_claims_do_not_change_who_gets_the_remainder() -> None:
    for a, b in [(9, 7), (7, 9), (8, 8), (9, 9)]:
        assert fair_shares({"a": a, "b": b}, 19) == {"a": 10, "b": 9}
    assert fair_shares({"a": 9, "b": 10}, 19) == {"a": 9, "b": 10}
