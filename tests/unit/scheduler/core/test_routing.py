"""The choice of the worker for a sequence."""

import numpy as np
import pytest

from pagewire.addresses import parse_worker_addresses, resolve
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.routing import ROUTERS
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.suspicion import Loss
from support.sequences import GREEDY


class Cluster:
    """Workers behind one queue; the test runs steps."""

    def __init__(self, routing: str, workers: int = 2) -> None:
        self.admission = Admission(FirstComeFirstServed(), ROUTERS[routing]())
        limits = WorkerLimits(200, 4, 8, 256, memory_threshold=1.0)
        self.workers = [self.admission.add_worker(limits) for _ in range(workers)]
        self.arrivals = 0

    def send(self, prompt: list[int], max_tokens: int = 50) -> int:
        """Queues a prompt; returns the number of the worker that got it."""
        tokens = np.array(prompt, np.int32)
        self.admission.waiting.push(Sequence(tokens, GREEDY, max_tokens, (), self.arrivals))
        self.arrivals += 1
        (admitted,) = self.admission.admit()
        assert admitted.batch is not None
        return self.workers.index(admitted.batch)

    def finish_all(self) -> None:
        """Each worker computes its sequences to the first token, and is then empty."""
        for batch in self.workers:
            _step(batch)
            for sequence in batch.running():
                batch.finish(sequence.slot, State.COMPLETED)


def _step(batch: WorkerBatch) -> None:
    plan = batch.plan()
    if plan is not None:
        batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))


def conversation(number: int, length: int = 60) -> list[int]:
    return [number] * length


def test_a_conversation_returns_to_the_worker_that_knows_it() -> None:
    cluster = Cluster("prefix-aware", workers=4)
    homes = [cluster.send(conversation(n)) for n in range(8)]
    assert sorted(homes) == [0, 0, 1, 1, 2, 2, 3, 3], "without a prefix they spread"
    cluster.finish_all()
    again = [cluster.send([*conversation(n), 9, 9]) for n in (5, 0, 3, 6)]
    assert again == [homes[n] for n in (5, 0, 3, 6)]


def test_a_known_prefix_does_not_outweigh_any_load() -> None:
    cluster = Cluster("prefix-aware")
    home = cluster.send(conversation(1))
    cluster.finish_all()
    placed = [cluster.send([*conversation(1), n]) for n in range(8)]
    assert placed[0] == home
    assert set(placed) == {0, 1}
    assert placed.count(home) > placed.count(1 - home)


def test_what_was_admitted_a_moment_ago_counts_as_load() -> None:
    """No step has run in between, so no worker has reported anything."""
    cluster = Cluster("prefix-aware")
    assert [cluster.send(conversation(n)) for n in range(4)] == [0, 1, 0, 1]
    assert cluster.send(conversation(9, 200)) == 0
    assert [cluster.send(conversation(n)) for n in range(10, 12)] == [1, 1]


@pytest.mark.parametrize("routing", ROUTERS)
def test_a_failed_or_draining_worker_is_left_out(routing: str) -> None:
    cluster = Cluster(routing, workers=3)
    cluster.send(conversation(1))
    lost, drained = cluster.workers[0], cluster.workers[1]
    assert len(cluster.admission.lose_worker(lost, Loss(), 0.0)) == 1
    cluster.admission.drain_worker(drained)
    assert [admitted.batch for admitted in cluster.admission.admit()] == [cluster.workers[2]]
    assert {cluster.send(conversation(n)) for n in range(2, 6)} == {2}


def test_round_robin_takes_turns() -> None:
    cluster = Cluster("round-robin", workers=3)
    assert [cluster.send(conversation(n)) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_counts_slots() -> None:
    cluster = Cluster("least-loaded")
    assert [cluster.send(conversation(n)) for n in range(4)] == [0, 1, 0, 1]
    cluster.workers[1].finish(cluster.workers[1].running()[0].slot, State.COMPLETED)
    _step(cluster.workers[1])
    assert cluster.send(conversation(4)) == 1


async def test_worker_addresses() -> None:
    listed = parse_worker_addresses("a:1, unix:/tmp/w,dns:b:2,dns:///c:3,dns:127.0.0.1:4")
    assert [(a.host, a.port) for a in listed] == [
        ("", 0),
        ("", 0),
        ("b", 2),
        ("c", 3),
        ("127.0.0.1", 4),
    ]
    assert [await resolve(a) for a in (listed[0], listed[4])] == [["a:1"], ["127.0.0.1:4"]]
    for bad in ("", "host", "dns:host", "dns:host:0", "host:x"):
        with pytest.raises(ValueError, match="worker"):
            parse_worker_addresses(bad)
