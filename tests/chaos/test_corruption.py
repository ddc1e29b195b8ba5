"""Bytes change on the way between processes: connections break, and no answer shows it."""

import asyncio
import os
import random
from pathlib import Path

import pytest

import support.processes.unchecked
from support.clients.load import Answer, Load, Question, differences, questions
from support.processes import real_model
from support.processes.fleet import Fleet, running_fleet
from support.processes.trial import CLIENTS, check, report, rest, undisturbed

pytestmark = pytest.mark.chaos

FAULT_SECONDS = 20.0
INTERVAL = 3.0  # between two bytes that change on a connection
CORRUPT = r"pagewire_corrupt_messages_total.*"


def seed() -> int:
    chosen = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {chosen}; repeat with CHAOS_SEED={chosen}")
    return chosen


async def garbled(
    fleet: Fleet, asked: list[Question], clients: int, rng: random.Random, interval: float
) -> list[Answer]:
    """What clients get while a byte changes on every connection each `interval` seconds."""
    load = Load(fleet.urls, asked, clients, endless=True)
    running = asyncio.create_task(load.run())
    for proxy in fleet.proxies:
        proxy.garble(rng, interval)
    await asyncio.sleep(FAULT_SECONDS)
    await load.reached(len(asked))
    for proxy in fleet.proxies:
        proxy.be_sound()
    load.stop()
    got = await running
    print(f"{sum(proxy.flips for proxy in fleet.proxies)} bytes changed")
    return got


def corrupt_messages(fleet: Fleet) -> int:
    return int(sum(fleet.metric(name, CORRUPT) for name in fleet.metrics))


async def run(fleet: Fleet, asked: list[Question], clients: int, tolerance: float = 0.0) -> None:
    rng = random.Random(seed())
    want = await undisturbed(fleet, asked)
    pids = dict(fleet.supervisor.pids)
    got = await garbled(fleet, asked, clients, rng, INTERVAL)
    corrupt = corrupt_messages(fleet)
    report(f"bytes changed, {corrupt} corrupt messages", asked, got, want)
    check(fleet, asked, got, want, tolerance)
    assert corrupt > 0
    assert fleet.supervisor.pids == pids, "a process was lost"
    assert not any("Traceback" in line for line in fleet.log), fleet.log
    await rest(fleet, workers=len(fleet.names("worker")))


async def test_changed_bytes_end_in_reconnections(requests: int) -> None:
    async with running_fleet(workers=4, schedulers=2, gateways=1) as fleet:
        await run(fleet, questions(requests), CLIENTS)


async def test_changed_bytes_do_not_show_in_the_real_models_answers() -> None:
    async with running_fleet(workers=2, worker_command=real_model.WORKER) as fleet:
        await run(fleet, real_model.questions(24), real_model.CLIENTS, tolerance=1e-4)


async def test_without_the_checksums_it_would_show(requests: int) -> None:
    """Else the tests above show nothing."""
    rng, asked = random.Random(seed()), questions(requests)
    unchecked = (str(Path(support.processes.unchecked.__file__)),)
    async with running_fleet(workers=4, schedulers=2, program=unchecked) as fleet:
        want = await undisturbed(fleet, asked)
        got = await garbled(fleet, asked, CLIENTS, rng, INTERVAL / 3)
        wrong = differences(asked, got, want)
        traceback = any("Traceback" in line for line in fleet.log)
        print(f"{len(wrong)} answers are wrong or failed; tracebacks: {traceback}")
        assert wrong or traceback
