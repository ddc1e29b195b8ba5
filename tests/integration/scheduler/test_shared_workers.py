"""Schedulers that share workers, as processes: shares even out under load, and no stream fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.clients.load import Answer, Load, Question, questions
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import CLIENTS, check_answers, report, undisturbed, until_idle

pytestmark = pytest.mark.timeout(600)

WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")


async def until_shares(fleet: Fleet, *want: int, seconds: float = 60.0) -> None:
    """Waits until the schedulers hold this many workers each; 0 for one that does not answer."""
    deadline = time.monotonic() + seconds
    while (have := await shares(fleet)) != want:
        assert time.monotonic() < deadline, (have, fleet.log[-40:])
        await asyncio.sleep(0.1)


async def shares(fleet: Fleet) -> tuple[int, ...]:
    return tuple(0 if load is None else load.ready_workers for load in await fleet.loads())


class Busy:
    """A fleet under load, and its expected answers."""

    def __init__(self, fleet: Fleet, asked: list[Question], want: list[Answer]) -> None:
        self.fleet = fleet
        self._asked = asked
        self._want = want

    @contextlib.asynccontextmanager
    async def load(self, name: str) -> AsyncIterator[Load]:
        """Streams while the context is open; checks that each has the undisturbed answer."""
        load = Load(self.fleet.urls, self._asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await load.reached(16)
        yield load
        await load.reached(load.done + 16)
        load.stop()
        got = await running
        report(name, self._asked, got, self._want)
        check_answers(self.fleet, self._asked, got, self._want)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy() -> AsyncIterator[Busy]:
    asked = questions(48)
    # Longer sequences move to other workers when their worker is released.
    flags = ("--drain-timeout=0.5",)
    async with running_fleet(4, 2, 2, scheduler_flags=flags, proxied=False, shared=True) as fleet:
        await until_shares(fleet, 2, 2)
        yield Busy(fleet, asked, await undisturbed(fleet, asked))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_schedulers_workers_are_taken_over_and_come_back_with_it(
    busy: Busy,
) -> None:
    fleet = busy.fleet
    async with busy.load("a scheduler of 2 that share 4 workers killed, and back"):
        fleet.stop_permanently("scheduler-0")
        await until_shares(fleet, 0, 4)
        await fleet.start_again("scheduler-0")
        await until_shares(fleet, 2, 2)
    await until_idle(fleet, 4)


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_come_and_go(busy: Busy) -> None:
    fleet = busy.fleet
    async with busy.load("shared workers leave the list, are killed, and come back") as load:
        fleet.list_workers("worker-0")
        await until_shares_sum(fleet, 1)
        await load.reached(load.done + 8)
        fleet.list_workers(*WORKERS)
        await until_shares(fleet, 2, 2)
        for name in ("worker-1", "worker-2"):
            fleet.stop_permanently(name)
        await until_shares(fleet, 1, 1)
        await fleet.start_again("worker-1", "worker-2")
        await until_shares(fleet, 2, 2)
    await until_idle(fleet, 4)


async def until_shares_sum(fleet: Fleet, want: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while sum(await shares(fleet)) != want:
        assert time.monotonic() < deadline, (await shares(fleet), fleet.log[-40:])
        await asyncio.sleep(0.1)


@pytest.mark.asyncio(loop_scope="module")
async def test_shares_that_are_even_stay(busy: Busy) -> None:
    fleet = busy.fleet
    await until_shares(fleet, 2, 2)
    pattern = r"pagewire_scheduler_worker_(claims|releases)_total"
    before = [fleet.metric(name, pattern) for name in ("scheduler-0", "scheduler-1")]
    await asyncio.sleep(4)
    assert [fleet.metric(name, pattern) for name in ("scheduler-0", "scheduler-1")] == before
    assert await shares(fleet) == (2, 2)
