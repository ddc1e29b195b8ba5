"""Requests that take down whatever runs them: exactly they fail, and innocents never do."""

import asyncio
import random
import signal
import time
from typing import Any

import httpx
import pytest

from pagewire.models import EMBEDDED_NAME
from support.clients.load import Load, questions
from support.processes.fleet import SIMULATED, running_fleet
from support.processes.poisoned import HANGS, KILLS
from support.processes.trial import check, figures, report, rest, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 16
SIMULATED_SLOWLY = (*SIMULATED, "--speedup=0.1")


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor starts what has just fallen again as soon as at the first time."""
    monkeypatch.setattr("pagewire.cli.launch.supervisor.LONGEST_RESTART_DELAY", 1.0)


def poison(first_token: int, number: int = 0) -> dict[str, Any]:
    """A request that takes processes down."""
    prompt = [first_token, 400 + number, 402]
    return {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 30, "ignore_eos": True}


# Below this many requests a run is small.
FULL_SIZE = 400

CASES = [
    # One worker, two, and schedulers with a worker each; who falls, how, how many poisons.
    ("worker", 2, 2, [KILLS]),
    ("scheduler", 2, 2, [KILLS, KILLS]),
    ("worker", 1, 1, [KILLS]),
    ("worker", 2, 1, [HANGS]),
    ("scheduler", 1, 1, [KILLS]),
    ("scheduler", 2, 2, [HANGS]),
    ("worker", 2, 1, [KILLS, KILLS]),
    ("worker", 1, 1, [HANGS]),
    ("scheduler", 1, 1, [HANGS]),
    ("scheduler", 1, 1, [KILLS, KILLS]),
    ("worker", 2, 2, [KILLS, HANGS]),
    ("scheduler", 2, 2, [KILLS, HANGS]),
]
# `make test` has the first cases, `make chaos` all of them.
SMALL_CASES = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases by the size of the run."""
    if "case" in metafunc.fixturenames:
        small = metafunc.config.getoption("--requests") < FULL_SIZE
        cases = CASES[:SMALL_CASES] if small else CASES
        ids = [f"{c[0]}s {c[1]}+{c[2]} {len(c[3])}x{c[3][-1]}" for c in cases]
        metafunc.parametrize("case", cases, ids=ids)


async def test_exactly_the_poison_fails(
    case: tuple[str, int, int, list[int]],
) -> None:
    victim, workers, schedulers, poisons = case
    asked = questions(40)
    async with (
        running_fleet(
            workers,
            schedulers,
            gateways=2,
            # What waits beside a trial is no overload here.
            scheduler_flags=("--step-timeout=3", "--max-waiting-seconds=inf"),
            worker_command=(*SIMULATED_SLOWLY, "--step-timeout=3"),
            poisoned=victim,
        ) as fleet,
        httpx.AsyncClient(timeout=300) as http,
    ):
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await load.reached(8)
        began = time.monotonic()
        failed = await asyncio.gather(
            *(
                http.post(f"{fleet.urls[n % 2]}/v1/completions", json=poison(token, n))
                for n, token in enumerate(poisons)
            )
        )
        took = time.monotonic() - began
        load.stop()
        got = await running
        report(f"{len(poisons)} poisons for {victim}s, {took:.1f} s", asked, got, want)
        check(fleet, asked, got, want)
        for answer in failed:
            assert answer.status_code == 500, (answer.text, fleet.log[-60:])
            assert f"{victim}s in a row were lost" in answer.json()["error"]["message"]
        ends = sum(f"{victim}-" in line and "starting it again" in line for line in fleet.log)
        # In company, then alone; of two, those of one in company make trials of the other void.
        each = 4 if victim == "worker" else 5
        assert ends <= each if len(poisons) == 1 else 2 * each + 2 * 3
        print(f"{ends} processes ended, pause {figures(asked, got, want)['longest_pause_s']:.1f} s")
        await rest(fleet, workers)


async def test_innocents_survive_both_schedulers_again_and_again(requests: int) -> None:
    """Killed at random moments, together and one after the other, as in a crash loop."""
    rng = random.Random(requests)
    asked = questions(max(48, requests))
    async with running_fleet(2, 2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        for _ in range(6 if requests < FULL_SIZE else 60):
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            fleet.signal(f"scheduler-{rng.randrange(2)}", signal.SIGKILL)
        load.stop()
        got = await running
        report("both schedulers killed again and again", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, 2)
