"""Processes die under load: every stream ends whole, as if nothing had happened.

Run at full size with `make chaos`.
"""

import asyncio
import os
import random
import signal
import time

import httpx
import pytest

from support.clients.load import Load, questions
from support.processes.faults import Faults
from support.processes.fleet import SIMULATED, Fleet, running_fleet
from support.processes.trial import CLIENTS, check, report, rest, undisturbed

pytestmark = pytest.mark.chaos

STOPPED_SECONDS = 12.0  # more than twice what it takes to be noticed


async def test_a_worker_and_then_a_scheduler_are_killed(requests: int) -> None:
    asked = questions(requests)
    async with running_fleet(workers=4, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS)
        running = asyncio.create_task(load.run())
        await load.reached(requests // 4)
        fleet.signal("worker-1", signal.SIGKILL)
        await load.reached(requests // 2)
        fleet.signal("scheduler-0", signal.SIGKILL)
        got = await running
        report("a worker of 4, then a scheduler of 2, killed", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, workers=4)


async def test_the_only_worker_is_killed_and_returns(requests: int) -> None:
    asked = questions(requests)
    async with running_fleet(workers=1) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS)
        running = asyncio.create_task(load.run())
        await load.reached(requests // 3)
        fleet.signal("worker-0", signal.SIGKILL)
        got = await running
        report("the only worker killed", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, workers=1)


async def test_the_only_scheduler_is_killed_and_returns(requests: int) -> None:
    asked = questions(requests)
    async with running_fleet(workers=2) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS)
        running = asyncio.create_task(load.run())
        await load.reached(requests // 3)
        fleet.signal("scheduler-0", signal.SIGKILL)
        got = await running
        report("the only scheduler killed", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, workers=2)


@pytest.mark.parametrize(("victim", "schedulers"), [("worker-0", 1), ("scheduler-0", 2)])
async def test_a_process_hangs_and_wakes(requests: int, victim: str, schedulers: int) -> None:
    """Others take over what it had; when it wakes, nothing that it still says counts."""
    asked = questions(requests)
    async with running_fleet(workers=2, schedulers=schedulers) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await load.reached(requests // 4)
        fleet.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_SECONDS)
        fleet.signal(victim, signal.SIGCONT)
        await load.reached(load.done + CLIENTS)
        load.stop()
        got = await running
        report(f"{victim} stopped for {STOPPED_SECONDS:g} s", asked, got, want)
        check(fleet, asked, got, want)
        assert max(answer.pause for answer in got) < STOPPED_SECONDS - 2, "it was waited for"
        await rest(fleet, workers=2)


async def test_a_new_scheduler_takes_over_in_under_a_second() -> None:
    """From the moment when it listens, for its start is the machine's, until its worker, which
    has kept what it loaded, serves it; then whoever has waited gets the answer."""
    asked = questions(8)
    async with running_fleet(workers=1) as fleet:
        want = await undisturbed(fleet, asked)
        worker = fleet.supervisor.pids["worker-0"]
        before = len(fleet.log)
        fleet.signal("scheduler-0", signal.SIGKILL)
        await asyncio.sleep(0.1)
        running = asyncio.create_task(Load(fleet.urls, asked, CLIENTS).run())

        async def until_logged(text: str) -> float:
            while not any(text in line for line in fleet.log[before:]):
                await asyncio.sleep(0.002)
            return time.monotonic()

        began = await until_logged("listening on")
        seconds = await until_logged("scheduler.server: ready") - began
        print(f"\na new scheduler serves {seconds:.2f} s after it listens")
        assert seconds < 1.0
        assert fleet.supervisor.pids["worker-0"] == worker
        check(fleet, asked, await running, want)


async def test_rolling_restart(requests: int) -> None:
    """SIGTERM to one process after the other; the next when the one before is back."""
    asked = questions(requests)
    async with running_fleet(workers=4, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        for name in fleet.names():
            await load.reached(load.done + 40)
            await restart(fleet, name, signal.SIGTERM)
        load.stop()
        got = await running
        report("every process restarted", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, workers=4)


async def restart(fleet: Fleet, name: str, number: signal.Signals) -> float:
    """Ends a process and waits for its successor; how long that took."""
    began = time.monotonic()
    before = fleet.supervisor.pids[name]
    fleet.signal(name, number)
    async with asyncio.timeout(90):
        while fleet.supervisor.pids.get(name, before) == before or not any(
            line.endswith(f"{name} is ready again") for line in fleet.log
        ):
            await asyncio.sleep(0.05)
    return time.monotonic() - began


async def test_random_faults(requests: int) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {seed}; repeat with CHAOS_SEED={seed}")
    asked = questions(requests, seed)
    async with running_fleet(workers=4, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        faults = Faults(fleet, random.Random(seed))
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await faults.some(8, interval=2.0)
        load.stop()
        got = await running
        report(f"random faults ({', '.join(faults.done)})", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, workers=4)


async def test_a_request_that_takes_schedulers_down_fails_alone() -> None:
    """The scheduler is killed whenever one request has come to it, while another one gets on."""
    slow = (*SIMULATED, "--speedup=0.05")
    chunks = ("--max-num-batched-tokens=64",)  # long prompts take a second until their first token
    poison = {"prompt": list(range(10, 1910)), "max_tokens": 5, "ignore_eos": True}
    innocent = {"prompt": [3, 4, 5], "max_tokens": 300, "ignore_eos": True, "seed": 1}
    async with (
        running_fleet(1, worker_command=slow, scheduler_flags=chunks) as fleet,
        httpx.AsyncClient(base_url=fleet.urls[0], timeout=180) as http,
    ):
        want = (await http.post("/v1/completions", json=innocent)).json()
        running = asyncio.create_task(http.post("/v1/completions", json=innocent))
        await asyncio.sleep(1.0)
        poisoned = asyncio.create_task(http.post("/v1/completions", json=poison))
        await asyncio.sleep(0.1)
        kills = 0
        while not poisoned.done():
            came = sum("goes on at" in line and "after 0 tokens" in line for line in fleet.log)
            if came >= kills:
                kills += 1
                fleet.signal("scheduler-0", signal.SIGKILL)
            await asyncio.sleep(0.02)
        failed, got = await poisoned, await running
    assert kills == 5, "three among others, two alone"
    assert failed.status_code == 500, failed.text
    assert "5 schedulers in a row were lost" in failed.json()["error"]["message"]
    assert got.json()["choices"] == want["choices"]
