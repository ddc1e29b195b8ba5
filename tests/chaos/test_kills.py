"""Processes are killed, paused or restarted under load: every stream stays complete.

`make chaos` runs these tests at full size.
"""

import asyncio
import os
import random
import signal
import time

import httpx
import pytest
import pytest_asyncio

from support.clients.load import Answer, Load, questions
from support.processes.faults import Faults
from support.processes.fleet import SIMULATED, Fleet, running_fleet
from support.processes.fleet_checks import (
    CLIENTS,
    check_answers,
    report,
    undisturbed,
    until_idle,
)
from support.processes.shared_fleet import SharedFleet
from support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]

GENERATED_TOKENS = "pagewire_scheduler_output_tokens_total"
PAUSED_SECONDS = 12.0  # more than twice the time until peers detect a pause


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def want(shared_fleet: SharedFleet, requests: int) -> list[Answer]:
    """The answers without faults, the same for every fleet."""
    fleet = await shared_fleet.get(workers=4, schedulers=2, gateways=2)
    return await undisturbed(fleet, questions(requests))


async def run_with_kills(
    fleet: Fleet, want: list[Answer], name: str, kills: list[tuple[float, str]]
) -> None:
    """Kills processes when a share of the requests is done; checks all answers."""
    asked = questions(len(want))
    workers = len(fleet.names("worker"))
    load = Load(fleet.urls, asked, CLIENTS)
    running = asyncio.create_task(load.run())
    for share, victim in kills:
        await load.reached(int(share * len(asked)))
        fleet.signal(victim, signal.SIGKILL)
    got = await running
    report(name, asked, got, want)
    check_answers(fleet, asked, got, want)
    await until_idle(fleet, workers)


async def test_a_worker_and_then_a_scheduler_are_killed(
    shared_fleet: SharedFleet, want: list[Answer]
) -> None:
    fleet = await shared_fleet.get(workers=4, schedulers=2, gateways=2)
    kills = [(1 / 4, "worker-1"), (1 / 2, "scheduler-0")]
    await run_with_kills(fleet, want, "a worker of 4, then a scheduler of 2, killed", kills)


async def test_rolling_restart(
    shared_fleet: SharedFleet, want: list[Answer], is_full_size: bool
) -> None:
    """One process after the other gets SIGTERM, once the previous one is ready again."""
    asked = questions(len(want))
    fleet = await shared_fleet.get(workers=4, schedulers=2, gateways=2)
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    for name in fleet.names():
        await load.reached(load.done + (40 if is_full_size else 16))
        before = len(fleet.log)
        fleet.signal(name, signal.SIGTERM)
        await fleet.until_restarted(name, since=before)
    load.stop()
    got = await running
    report("every process restarted", asked, got, want)
    check_answers(fleet, asked, got, want)
    await until_idle(fleet, workers=4)


async def test_random_faults(shared_fleet: SharedFleet, requests: int) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {seed}; repeat with CHAOS_SEED={seed}")
    asked = questions(requests, seed)
    fleet = await shared_fleet.get(workers=4, schedulers=2, gateways=2)
    want = await undisturbed(fleet, asked)
    faults = Faults(fleet, random.Random(seed))
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    await faults.some(8, interval=2.0)
    load.stop()
    got = await running
    report(f"random faults ({', '.join(faults.done)})", asked, got, want)
    check_answers(fleet, asked, got, want)
    await until_idle(fleet, workers=4)


async def test_the_only_worker_is_killed_and_returns(
    shared_fleet: SharedFleet, want: list[Answer]
) -> None:
    fleet = await shared_fleet.get(workers=1)
    await run_with_kills(fleet, want, "the only worker killed", [(1 / 3, "worker-0")])


async def test_a_new_scheduler_takes_over_in_under_a_second(shared_fleet: SharedFleet) -> None:
    """A new scheduler serves the running worker within a second after it listens.

    The start of the process is not counted: it depends on the machine.
    """
    asked = questions(8)
    fleet = await shared_fleet.get(workers=1)
    want = await undisturbed(fleet, asked)
    pids = fleet.supervisor.pids
    before = len(fleet.log)
    fleet.signal("scheduler-0", signal.SIGKILL)
    await eventually(lambda: fleet.supervisor.pids.get("scheduler-0") != pids["scheduler-0"])
    running = asyncio.create_task(Load(fleet.urls, asked, CLIENTS).run())

    async def until_logged(text: str) -> float:
        while not any(text in line for line in fleet.log[before:]):
            await asyncio.sleep(0.002)
        return time.monotonic()

    began = await until_logged("listening on")
    seconds = await until_logged("scheduler.server: ready") - began
    print(f"\na new scheduler serves {seconds:.2f} s after it listens")
    assert seconds < 1.0
    assert fleet.supervisor.pids["worker-0"] == pids["worker-0"]
    check_answers(fleet, asked, await running, want)


async def test_the_only_scheduler_is_killed_and_returns(
    shared_fleet: SharedFleet, want: list[Answer]
) -> None:
    fleet = await shared_fleet.get(workers=2)
    await run_with_kills(fleet, want, "the only scheduler killed", [(1 / 3, "scheduler-0")])


@pytest.mark.parametrize(("victim", "schedulers"), [("worker-0", 1), ("scheduler-0", 2)])
async def test_a_process_is_paused_and_continues(
    shared_fleet: SharedFleet, want: list[Answer], victim: str, schedulers: int
) -> None:
    """Other processes take over its requests; its messages after the pause are ignored."""
    asked = questions(len(want))
    fleet = await shared_fleet.get(workers=2, schedulers=schedulers)
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    await load.reached(len(asked) // 4)
    fleet.signal(victim, signal.SIGSTOP)
    await asyncio.sleep(PAUSED_SECONDS)
    fleet.signal(victim, signal.SIGCONT)
    await load.reached(load.done + CLIENTS)
    load.stop()
    got = await running
    report(f"{victim} paused for {PAUSED_SECONDS:g} s", asked, got, want)
    check_answers(fleet, asked, got, want)
    longest = max(answer.pause for answer in got)
    assert longest < PAUSED_SECONDS - 2, "streams must not wait for the paused process"
    await until_idle(fleet, workers=2)


async def test_only_the_request_that_ends_schedulers_fails() -> None:
    """A scheduler is killed each time it gets one request, while another request runs."""
    slow = (*SIMULATED, "--speedup=0.05")
    chunks = ("--max-num-batched-tokens=64",)  # a long prompt needs a second until its first token
    fatal = {"prompt": list(range(10, 1910)), "max_tokens": 5, "ignore_eos": True}
    other = {"prompt": [3, 4, 5], "max_tokens": 300, "ignore_eos": True, "seed": 1}
    async with (
        running_fleet(1, worker_command=slow, scheduler_flags=chunks) as fleet,
        httpx.AsyncClient(base_url=fleet.urls[0], timeout=180) as http,
    ):
        want = (await http.post("/v1/completions", json=other)).json()
        generated = fleet.metric("scheduler-0", GENERATED_TOKENS)
        running = asyncio.create_task(http.post("/v1/completions", json=other))
        # The other request gets a token, so that the log distinguishes the two.
        while fleet.metric("scheduler-0", GENERATED_TOKENS) == generated:
            await asyncio.sleep(0.05)
        failing = asyncio.create_task(http.post("/v1/completions", json=fatal))
        while sum(load.running + load.waiting for load in await fleet.loads() if load) < 2:
            await asyncio.sleep(0.02)
        kills = 0
        while not failing.done():
            arrivals = sum("goes on at" in line and "after 0 tokens" in line for line in fleet.log)
            if arrivals >= kills:
                kills += 1
                fleet.signal("scheduler-0", signal.SIGKILL)
            await asyncio.sleep(0.02)
        failed, got = await failing, await running
    assert kills == 5, "three with other requests, two alone"
    assert failed.status_code == 500, failed.text
    assert "5 schedulers in a row were lost" in failed.json()["error"]["message"]
    assert got.status_code == 200, (got.text, fleet.log[-80:])
    assert got.json()["choices"] == want["choices"]
