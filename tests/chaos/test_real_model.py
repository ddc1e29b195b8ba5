"""The embedded model with torch operations in float32: faults do not change its answers."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.clients.load import Answer, Load
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import check_answers, report, undisturbed, until_idle
from support.processes.real_model import CLIENTS, WORKER, questions

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]


PAUSED_SECONDS = 7  # longer than a peer waits for a heartbeat


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers() -> AsyncIterator[Fleet]:
    async with running_fleet(workers=2, worker_command=WORKER) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed_answers(two_workers: Fleet) -> list[Answer]:
    """The answers to 24 questions."""
    return await undisturbed(two_workers, questions(24), CLIENTS)


async def run_with_fault(
    fleet: Fleet, want: list[Answer], victim: str, number: signal.Signals
) -> None:
    """Sends a signal when a quarter of the questions is answered; checks all answers."""
    asked = questions(len(want))
    load = Load(fleet.urls, asked, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.reached(len(asked) // 4)
    fleet.signal(victim, number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(PAUSED_SECONDS)
        fleet.signal(victim, signal.SIGCONT)
    got = await running
    report(f"real model, {number.name} to {victim}", asked, got, want)
    check_answers(fleet, asked, got, want, tolerance=1e-4)
    await until_idle(fleet, workers=len(fleet.names("worker")))


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-0", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("scheduler-0", signal.SIGKILL),
    ],
)
async def test_answers_equal_those_of_an_undisturbed_run(
    two_workers: Fleet, undisturbed_answers: list[Answer], victim: str, number: signal.Signals
) -> None:
    await run_with_fault(two_workers, undisturbed_answers, victim, number)


async def test_the_only_worker_with_the_real_model_is_killed_and_returns() -> None:
    async with running_fleet(workers=1, worker_command=WORKER) as fleet:
        want = await undisturbed(fleet, questions(12), CLIENTS)
        await run_with_fault(fleet, want, "worker-0", signal.SIGKILL)
