"""Requests that end or block the processes that run them: only these requests fail."""

import asyncio
import random
import signal
import time
from typing import Any

import httpx
import pytest

from pagewire.models import EMBEDDED_NAME
from support.clients.load import Load, questions
from support.processes.failing_services import KILLS, STALLS
from support.processes.fleet import SIMULATED, running_fleet
from support.processes.fleet_checks import (
    FULL_SIZE,
    check_answers,
    figures,
    report,
    undisturbed,
    until_idle,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 16
SIMULATED_SLOWLY = (*SIMULATED, "--speedup=0.1")


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor waits at most a second before it restarts a process."""
    monkeypatch.setattr("pagewire.cli.launch.supervisor.MAX_RESTART_DELAY", 1.0)


def fatal_request(first_token: int, number: int = 0) -> dict[str, Any]:
    """A request that makes a failing service fail; see `failing_services.py`."""
    prompt = [first_token, 400 + number, 402]
    return {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 30, "ignore_eos": True}


CASES = [
    # The service that fails, the number of workers and of schedulers, the fatal requests.
    ("worker", 2, 2, [KILLS]),
    ("scheduler", 2, 2, [KILLS, KILLS]),
    ("worker", 1, 1, [KILLS]),
    ("worker", 2, 1, [STALLS]),
    ("scheduler", 1, 1, [KILLS]),
    ("scheduler", 2, 2, [STALLS]),
    ("worker", 2, 1, [KILLS, KILLS]),
    ("worker", 1, 1, [STALLS]),
    ("scheduler", 1, 1, [STALLS]),
    ("scheduler", 1, 1, [KILLS, KILLS]),
    ("worker", 2, 2, [KILLS, STALLS]),
    ("scheduler", 2, 2, [KILLS, STALLS]),
]
# `make test` has the first cases, `make chaos` all of them.
SMALL_CASES = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Selects the cases by the size of the run."""
    if "case" in metafunc.fixturenames:
        small = metafunc.config.getoption("--requests") < FULL_SIZE
        cases = CASES[:SMALL_CASES] if small else CASES
        ids = [f"{c[0]}s {c[1]}+{c[2]} {len(c[3])}x{c[3][-1]}" for c in cases]
        metafunc.parametrize("case", cases, ids=ids)


async def test_only_the_fatal_requests_fail(
    case: tuple[str, int, int, list[int]],
) -> None:
    victim, workers, schedulers, fatal = case
    asked = questions(40)
    async with (
        running_fleet(
            workers,
            schedulers,
            gateways=2,
            # Requests may wait long while a suspect runs alone.
            scheduler_flags=("--step-timeout=3", "--max-waiting-seconds=inf"),
            worker_command=(*SIMULATED_SLOWLY, "--step-timeout=3"),
            failing=victim,
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
                http.post(f"{fleet.urls[n % 2]}/v1/completions", json=fatal_request(token, n))
                for n, token in enumerate(fatal)
            )
        )
        took = time.monotonic() - began
        load.stop()
        got = await running
        report(f"{len(fatal)} fatal requests for {victim}s, {took:.1f} s", asked, got, want)
        check_answers(fleet, asked, got, want)
        for answer in failed:
            assert answer.status_code == 500, (answer.text, fleet.log[-60:])
            assert f"{victim}s in a row were lost" in answer.json()["error"]["message"]
        ends = sum(f"{victim}-" in line and "starting it again" in line for line in fleet.log)
        # Each fails with other requests first, then alone. One of two can void the other's attempts
        # alone.
        each = 4 if victim == "worker" else 5
        allowed = each if len(fatal) == 1 else 2 * each + 2 * 3
        assert ends <= allowed, "\n".join(fleet.log)
        print(f"{ends} processes ended, pause {figures(asked, got, want)['longest_pause_s']:.1f} s")
        await until_idle(fleet, workers)


async def test_streams_survive_repeated_kills_of_both_schedulers(
    requests: int, is_full_size: bool
) -> None:
    """Both are killed at random times, as in a crash loop."""
    rng = random.Random(requests)
    asked = questions(max(48, requests))
    async with running_fleet(2, 2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        for _ in range(60 if is_full_size else 6):
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            fleet.signal(f"scheduler-{rng.randrange(2)}", signal.SIGKILL)
        load.stop()
        got = await running
        report("both schedulers killed again and again", asked, got, want)
        check_answers(fleet, asked, got, want)
        await until_idle(fleet, 2)
