"""Worker processes are killed, added, drained and removed while a scheduler uses them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pagewire.addresses import Address
from pagewire.config import SchedulerConfig
from pagewire.models import EMBEDDED, resolve_model, served_name
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.scheduler.workers import membership as workers_module
from pagewire.scheduler.workers.membership import Workers
from support.clients.engine_client import generate
from support.processes.worker_process import WorkerProcess, worker_process
from support.waiting import eventually

PROMPTS = [f"Tell me a story about {n} foxes." for n in range(8)]
TOKENS = 120
NAME = Address("dns:workers:1", "workers", 1)


class WorkerPool:
    """Worker processes that the tests of this module share."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._workers: dict[str, WorkerProcess] = {}

    def pair(self) -> list[WorkerProcess]:
        """Two running workers; starts missing ones."""
        running = [w for w in self._workers.values() if w.process.poll() is None][:2]
        return running + [self.start() for _ in range(2 - len(running))]

    def start(self) -> WorkerProcess:
        """Starts one more worker."""
        return self._start(f"worker-{len(self._workers)}")

    def start_again(self, worker: WorkerProcess) -> WorkerProcess:
        """Restarts an ended worker at the same address."""
        return self._start(worker.socket.parent.name)

    def _start(self, name: str) -> WorkerProcess:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        settings = {"num_blocks": 400, "num_slots": 8, "drain_timeout": 60.0}
        worker = self._stack.enter_context(worker_process(folder, EMBEDDED, **settings))
        self._workers[name] = worker
        return worker


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    with contextlib.ExitStack() as stack:
        yield WorkerPool(tmp_path_factory.mktemp("workers"), stack)


class Cluster:
    """A scheduler in this process, and a name that resolves to its workers."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(resolve_model(EMBEDDED))
        self.engine = Engine(
            SchedulerConfig(), served_name(EMBEDDED, None), tokenizer, lambda: None
        )
        self.listed: list[str] = []
        self.workers = Workers([NAME], self.engine, 30.0, self._resolve)

    async def _resolve(self, address: Address) -> list[str]:
        assert address == NAME
        return list(self.listed)

    def running_on(self, worker: WorkerProcess) -> int:
        """Sequences on a worker; -1 if it is not connected."""
        for link, ready in self.engine._workers.by_link.items():
            if link.address == worker.address:
                return ready.batch.num_running
        return -1

    def all(self) -> "asyncio.Future[list[bytes]]":
        """The answers to all prompts, sent at once."""
        return asyncio.gather(*(generate(self.engine, prompt, TOKENS) for prompt in PROMPTS))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(workers_module, "RESOLVE_SECONDS", 0.1)
    cluster = Cluster()
    running = asyncio.create_task(cluster.workers.run())
    yield cluster
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_is_killed_and_another_is_added(cluster: Cluster, pool: WorkerPool) -> None:
    first, second = pool.pair()
    cluster.listed = [first.address]
    await eventually(lambda: cluster.running_on(first) == 0, 60)
    undisturbed = await cluster.all()
    cluster.listed = [first.address, second.address]
    await eventually(lambda: cluster.running_on(second) == 0, 60)
    disturbed = asyncio.ensure_future(cluster.all())
    await eventually(lambda: cluster.running_on(first) > 0 and cluster.running_on(second) > 0)
    first.process.kill()
    assert await asyncio.wait_for(disturbed, 60) == undisturbed
    assert cluster.running_on(first) == -1
    again = asyncio.ensure_future(cluster.all())
    await eventually(lambda: cluster.running_on(second) > 0)
    third = pool.start()
    cluster.listed = [second.address, third.address]
    await eventually(lambda: cluster.running_on(third) >= 0, 60)
    assert await asyncio.wait_for(again, 60) == undisturbed
    more = asyncio.ensure_future(cluster.all())
    await eventually(lambda: cluster.running_on(third) > 0)
    assert await asyncio.wait_for(more, 60) == undisturbed


async def test_a_removed_worker_finishes_its_sequences(cluster: Cluster, pool: WorkerPool) -> None:
    first, second = pool.pair()
    cluster.listed = [first.address, second.address]
    await eventually(lambda: cluster.engine.load().ready_workers == 2, 60)
    running = asyncio.ensure_future(cluster.all())
    await eventually(lambda: cluster.running_on(first) > 1)
    cluster.listed = [second.address]
    await eventually(lambda: cluster.engine.load().ready_workers == 1)
    on_first = cluster.running_on(first)
    assert on_first > 1, "its sequences continue"
    late = asyncio.create_task(generate(cluster.engine, "Late.", TOKENS))
    running_now = len(PROMPTS) + 1  # no sequence has ended, and none waits
    await eventually(lambda: cluster.running_on(first) + cluster.running_on(second) == running_now)
    assert cluster.running_on(first) == on_first, "it gets no new sequence"
    await asyncio.gather(running, late)
    await eventually(lambda: cluster.running_on(first) == -1)
    assert first.process.poll() is None, "the worker process continues"
    cluster.listed = [first.address, second.address]
    await eventually(lambda: cluster.running_on(first) == 0, 10)


async def test_a_terminated_worker_ends_after_its_last_sequence(
    cluster: Cluster, pool: WorkerPool
) -> None:
    first, second = pool.pair()
    cluster.listed = [first.address, second.address]
    await eventually(lambda: cluster.engine.load().ready_workers == 2, 60)
    running = asyncio.ensure_future(cluster.all())
    await eventually(lambda: cluster.running_on(first) > 1)
    first.terminate()
    await eventually(lambda: cluster.engine.load().ready_workers == 1)
    assert cluster.running_on(first) > 1, "its sequences continue"
    await running
    assert await asyncio.wait_for(first.exit_status(), 10) == 0, "long before its grace ends"
    first = pool.start_again(first)
    await eventually(lambda: cluster.running_on(first) == 0, 60)
