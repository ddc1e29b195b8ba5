"""Bytes change on connections between services: connections break, answers stay the same."""

import asyncio
import os
import random
from pathlib import Path

import pytest

import support.processes.without_checksums
from support.clients.load import Answer, Load, Question, differences, questions
from support.processes import real_model
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import CLIENTS, check_answers, report, undisturbed, until_idle

pytestmark = pytest.mark.chaos

FAULT_SECONDS, SMALL_FAULT_SECONDS = 10.0, 6.0
INTERVAL = 1.5  # seconds between two changed bytes of a proxy
CORRUPT = r"pagewire_corrupt_messages_total.*"


@pytest.fixture
def seconds(is_full_size: bool) -> float:
    """Seconds during which bytes change."""
    return FAULT_SECONDS if is_full_size else SMALL_FAULT_SECONDS


def seed() -> int:
    chosen = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {chosen}; repeat with CHAOS_SEED={chosen}")
    return chosen


async def run_corrupted(
    fleet: Fleet,
    asked: list[Question],
    clients: int,
    rng: random.Random,
    interval: float,
    seconds: float,
) -> list[Answer]:
    """The answers while a byte of each proxy changes about every `interval` seconds."""
    load = Load(fleet.urls, asked, clients, endless=True)
    running = asyncio.create_task(load.run())
    for proxy in fleet.proxies:
        proxy.corrupt(rng, interval)
    await asyncio.sleep(seconds)
    await load.reached(len(asked))
    for proxy in fleet.proxies:
        proxy.stop_corrupting()
    load.stop()
    got = await running
    print(f"{sum(proxy.corrupted_bytes for proxy in fleet.proxies)} bytes changed")
    return got


def corrupt_messages(fleet: Fleet) -> int:
    return int(sum(fleet.metric(name, CORRUPT) for name in fleet.metrics))


def traceback_in(fleet: Fleet) -> str:
    """The lines of the log from the first traceback on."""
    first = next(n for n, line in enumerate(fleet.log) if "Traceback" in line)
    return "\n".join(fleet.log[max(0, first - 3) : first + 40])


async def check_run(
    fleet: Fleet, asked: list[Question], clients: int, seconds: float, tolerance: float = 0.0
) -> None:
    rng = random.Random(seed())
    want = await undisturbed(fleet, asked)
    pids = dict(fleet.supervisor.pids)
    got = await run_corrupted(fleet, asked, clients, rng, INTERVAL, seconds)
    corrupt = corrupt_messages(fleet)
    report(f"bytes changed, {corrupt} corrupt messages", asked, got, want)
    check_answers(fleet, asked, got, want, tolerance)
    assert corrupt > 0
    assert fleet.supervisor.pids == pids, "a process was lost"
    assert "Traceback" not in "".join(fleet.log), traceback_in(fleet)
    await until_idle(fleet, workers=len(fleet.names("worker")))


async def test_corrupted_bytes_only_break_connections(requests: int, seconds: float) -> None:
    async with running_fleet(workers=4, schedulers=2, gateways=1) as fleet:
        await check_run(fleet, questions(requests), CLIENTS, seconds)


async def test_corrupted_bytes_do_not_change_the_real_models_answers(seconds: float) -> None:
    async with running_fleet(workers=2, worker_command=real_model.WORKER) as fleet:
        asked = real_model.questions(24)
        await check_run(fleet, asked, real_model.CLIENTS, seconds, tolerance=1e-4)


async def test_answers_change_without_checksums(requests: int, seconds: float) -> None:
    """A negative control: without checksums the tests above would fail."""
    rng, asked = random.Random(seed()), questions(requests)
    program = (str(Path(support.processes.without_checksums.__file__)),)
    async with running_fleet(workers=4, schedulers=2, program=program) as fleet:
        want = await undisturbed(fleet, asked)
        got = await run_corrupted(fleet, asked, CLIENTS, rng, INTERVAL / 3, seconds)
        wrong = differences(asked, got, want)
        traceback = any("Traceback" in line for line in fleet.log)
        print(f"{len(wrong)} answers are wrong or failed; tracebacks: {traceback}")
        assert wrong or traceback
