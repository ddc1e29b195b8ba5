"""One scheduler and several worker processes: killed, added, drained and removed while it runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
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


class Cluster:
    """A scheduler in this process, and the name that stands for its workers."""

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
        """Every prompt at once."""
        return asyncio.gather(*(generate(self.engine, prompt, TOKENS) for prompt in PROMPTS))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(workers_module, "RESOLVE_SECONDS", 0.1)
    cluster = Cluster()
    running = asyncio.create_task(cluster.workers.run())
    yield cluster
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def start(stack: contextlib.ExitStack, folder: Path) -> WorkerProcess:
    folder.mkdir(exist_ok=True)
    settings = {"num_blocks": 400, "num_slots": 8, "drain_timeout": 60.0}
    return stack.enter_context(worker_process(folder, EMBEDDED, **settings))


async def test_a_worker_is_killed_and_another_is_added(cluster: Cluster, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (start(stack, tmp_path / name) for name in "ab")
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
        third = start(stack, tmp_path / "c")
        cluster.listed = [second.address, third.address]
        await eventually(lambda: cluster.running_on(third) >= 0, 60)
        assert await asyncio.wait_for(again, 60) == undisturbed
        more = asyncio.ensure_future(cluster.all())
        await eventually(lambda: cluster.running_on(third) > 0)
        assert await asyncio.wait_for(more, 60) == undisturbed


async def test_a_removed_worker_finishes_what_it_has(cluster: Cluster, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (start(stack, tmp_path / name) for name in "ab")
        cluster.listed = [first.address, second.address]
        await eventually(lambda: cluster.engine.load().ready_workers == 2, 60)
        running = asyncio.ensure_future(cluster.all())
        await eventually(lambda: cluster.running_on(first) > 1)
        cluster.listed = [second.address]
        await eventually(lambda: cluster.engine.load().ready_workers == 1)
        on_first = cluster.running_on(first)
        assert on_first > 1, "its sequences go on"
        late = asyncio.create_task(generate(cluster.engine, "Late.", TOKENS))
        await eventually(lambda: cluster.engine.num_open == len(PROMPTS) + 1)
        await asyncio.sleep(0.1)
        assert cluster.running_on(first) <= on_first
        await asyncio.gather(running, late)
        await eventually(lambda: cluster.running_on(first) == -1)
        assert first.process.poll() is None, "the worker itself was not told to end"
        cluster.listed = [first.address, second.address]
        await eventually(lambda: cluster.running_on(first) == 0, 10)


async def test_a_worker_that_is_told_to_end_ends_when_it_has_nothing_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (start(stack, tmp_path / name) for name in "ab")
        cluster.listed = [first.address, second.address]
        await eventually(lambda: cluster.engine.load().ready_workers == 2, 60)
        running = asyncio.ensure_future(cluster.all())
        await eventually(lambda: cluster.running_on(first) > 1)
        first.terminate()
        await eventually(lambda: cluster.engine.load().ready_workers == 1)
        assert cluster.running_on(first) > 1, "its sequences go on"
        await running
        assert await asyncio.wait_for(first.exit_status(), 10) == 0, "long before its grace ends"
        first = start(stack, tmp_path / "a")
        await eventually(lambda: cluster.running_on(first) == 0, 60)
