"""Bounds of the pauses of streams: the time to detect a fault, to restart the process and to
recompute its sequences.

A start is timed under the same load, right before the faults.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

import pytest

from pagewire.cli.launch.health import until_healthy
from pagewire.cli.launch.processes import ChildProcess
from pagewire.cli.launch.supervisor import MAX_SERVED_DELAY
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, SILENT_HEARTBEATS
from support.clients.load import Load, Question, questions
from support.processes.fleet import PROGRAM, SIMULATED, Fleet, running_fleet
from support.processes.fleet_checks import CLIENTS, check_answers, report, undisturbed, until_idle
from support.processes.shared_fleet import SharedFleet
from support.processes.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]

Faults = Callable[[Load], Awaitable[None]]

ROUNDS, SMALL_ROUNDS = 4, 2
# Recomputed steps and late polls: a busy machine adds to each part.
SLACK_SECONDS = 2.0
NOTICE_SECONDS = (SILENT_HEARTBEATS + 1) * HEARTBEAT_SECONDS
# A connection is retried after at most half a second. No name has to be resolved here.
RECONNECT_SECONDS = 0.5
# A model with worthwhile copies of blocks, and memory for about half of its clients.
HOST_MEMORY = (
    "simulated-worker",
    "--profile=h200-llama-3.1-8b",
    "--num-blocks=200",
    "--num-slots=128",
    "--max-model-len=512",
    "--host-memory-gb=1",
)


@pytest.fixture
def rounds(is_full_size: bool) -> int:
    """The number of rounds of each fault. Rounds differ in the victim or the fault."""
    return ROUNDS if is_full_size else SMALL_ROUNDS


async def start_seconds(worker: tuple[str, ...]) -> float:
    """Seconds until a new worker process serves."""
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        address = f"unix:{folder}/worker.sock"
        command = (sys.executable, *PROGRAM, *worker, f"--worker-address={address}")
        began = time.monotonic()
        process = await ChildProcess.start(command, {}, lambda _: None)
        try:
            await until_healthy(address)
            return time.monotonic() - began
        finally:
            process.kill()
            await process.wait()


async def until_ready(fleet: Fleet, workers: int) -> None:
    """Waits until the schedulers have `workers` ready workers."""
    async with asyncio.timeout(60):
        while True:
            loads = await fleet.loads()
            if sum(load.ready_workers for load in loads if load is not None) == workers:
                return
            await asyncio.sleep(0.05)


async def under_load(
    fleet: Fleet, asked: list[Question], name: str, faults: Faults, worker: tuple[str, ...] = ()
) -> tuple[float, float]:
    """Checks the answers to a load with faults.

    Returns the seconds by which its longest pause exceeds that of an undisturbed run, and the
    start time of a new `worker`, 0 without one.
    """
    want = await undisturbed(fleet, asked)
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    await load.reached(CLIENTS)
    start = max([await start_seconds(worker) for _ in range(2)]) if worker else 0.0
    await faults(load)
    await load.reached(load.done + CLIENTS)
    load.stop()
    got = await running
    report(f"{name}; a start took {start:.2f} s", asked, got, want)
    check_answers(fleet, asked, got, want)
    await until_idle(fleet, workers=len(fleet.names("worker")))
    pauses = [max(answer.pause for answer in answers) for answers in (got, want)]
    return pauses[0] - pauses[1], start


async def test_a_worker_is_killed_while_another_drains(requests: int, rounds: int) -> None:
    """No worker accepts new sequences until one of the two has restarted."""
    asked = questions(requests)
    async with running_fleet(workers=2) as fleet:

        async def faults(load: Load) -> None:
            for number in range(rounds):
                drained, killed = f"worker-{number % 2}", f"worker-{1 - number % 2}"
                before = len(fleet.log)
                fleet.signal(drained, signal.SIGTERM)
                await asyncio.sleep(0.1 * (number + 1))
                fleet.signal(killed, signal.SIGKILL)
                await fleet.until_restarted(drained, killed, since=before)
                await until_ready(fleet, 2)

        pause, start = await under_load(
            fleet, asked, "killed while another drains", faults, SIMULATED
        )
        assert pause <= MAX_SERVED_DELAY + 2 * start + SLACK_SECONDS


async def test_workers_are_killed_while_they_copy_blocks(requests: int, rounds: int) -> None:
    """The blocks in host memory are lost too, and are recomputed."""
    asked = questions(requests)
    patient = ("--max-waiting-seconds=60",)
    async with running_fleet(1, worker_command=HOST_MEMORY, scheduler_flags=patient) as fleet:
        copied = 0.0

        async def faults(load: Load) -> None:
            nonlocal copied
            for _ in range(rounds):
                await load.reached(load.done + CLIENTS)
                copied += fleet.metric("worker-0", "pagewire_worker_(saved|loaded)_blocks_total")
                before = len(fleet.log)
                fleet.signal("worker-0", signal.SIGKILL)
                await fleet.until_restarted("worker-0", since=before)
                await until_ready(fleet, 1)

        pause, start = await under_load(fleet, asked, "killed while copying", faults, HOST_MEMORY)
        print(f"{copied:.0f} blocks were copied")
        assert copied > 0
        assert pause <= MAX_SERVED_DELAY + start + SLACK_SECONDS


@pytest.mark.parametrize("at_once", [1, 2])
async def test_connections_are_cut_frozen_and_slow(
    shared_fleet: SharedFleet, requests: int, rounds: int, at_once: int
) -> None:
    """A stream waits until each fault on its path is detected, and continues on another path."""
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {seed}; repeat with CHAOS_SEED={seed}")
    rng, asked = random.Random(seed), questions(requests)
    fleet = await shared_fleet.get(workers=4, schedulers=2, gateways=2)

    async def one(proxy: TcpProxy, kind: str) -> None:
        print(f"{kind} {proxy.target}")
        if kind == "cut":
            proxy.cut()
        elif kind == "freeze":
            await proxy.freeze(2 * NOTICE_SECONDS)
        else:
            await proxy.slow(NOTICE_SECONDS)

    async def faults(load: Load) -> None:
        for number in range(rounds):
            kinds = ["freeze" if number % 2 else rng.choice(["cut", "slow"])]
            kinds += rng.choices(["cut", "freeze", "slow"], k=at_once - 1)
            async with asyncio.TaskGroup() as group:
                for proxy, kind in zip(rng.sample(fleet.proxies, at_once), kinds, strict=True):
                    group.create_task(one(proxy, kind))
            await until_ready(fleet, 4)

    name = f"{at_once} connections at once cut, frozen or slow"
    pause, _ = await under_load(fleet, asked, name, faults)
    assert pause <= at_once * (NOTICE_SECONDS + RECONNECT_SECONDS) + SLACK_SECONDS
