"""The embedded model on the reference backend in fp32: no byte shows what a run has survived."""

import asyncio
import signal

import pytest

from support.clients.load import Load, Question
from support.processes.fleet import Fleet, running_fleet
from support.processes.real_model import CLIENTS, WORKER, questions
from support.processes.trial import check, report, rest

pytestmark = pytest.mark.chaos


async def run(fleet: Fleet, asked: list[Question], victim: str, number: signal.Signals) -> None:
    want = await Load(fleet.urls, asked, CLIENTS).run()
    load = Load(fleet.urls, asked, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.reached(len(asked) // 4)
    fleet.signal(victim, number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(7)
        fleet.signal(victim, signal.SIGCONT)
    got = await running
    report(f"real model, {number.name} to {victim}", asked, got, want)
    check(fleet, asked, got, want, tolerance=1e-4)
    await rest(fleet, workers=len(fleet.names("worker")))


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-0", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("scheduler-0", signal.SIGKILL),
    ],
)
async def test_every_byte_is_as_in_an_undisturbed_run(victim: str, number: signal.Signals) -> None:
    asked = questions(24)
    async with running_fleet(workers=2, worker_command=WORKER) as fleet:
        await run(fleet, asked, victim, number)


async def test_the_only_worker_with_the_real_model_returns() -> None:
    asked = questions(12)
    async with running_fleet(workers=1, worker_command=WORKER) as fleet:
        await run(fleet, asked, "worker-0", signal.SIGKILL)
