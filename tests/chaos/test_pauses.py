"""How long streams stand still: no longer than it takes to notice the fault, to start the process
again and to compute its sequences again.

A start is timed on the same machine under the same load, right before the faults.
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
from support.processes.tcp_proxy import TcpProxy
from support.processes.trial import CLIENTS, check, report, rest, undisturbed

pytestmark = pytest.mark.chaos

Faults = Callable[[Load], Awaitable[None]]

ROUNDS = 4
# Steps that are computed again, looks that come late: what a machine under load adds to each part.
SLACK_SECONDS = 2.0
NOTICE_SECONDS = (SILENT_HEARTBEATS + 1) * HEARTBEAT_SECONDS
# A connection is tried again after at most half a second, and a name is not looked up here.
RECONNECT_SECONDS = 0.5
# A model whose blocks are worth a copy, and memory for about half of its clients at their longest.
HOST_MEMORY = (
    "simulated-worker",
    "--profile=h200-llama-3.1-8b",
    "--num-blocks=200",
    "--num-slots=128",
    "--max-model-len=512",
    "--host-memory-gb=1",
)


async def start_seconds(worker: tuple[str, ...]) -> float:
    """How long a fresh worker process takes now until it serves."""
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
    """Until so many workers are ready at their schedulers."""
    async with asyncio.timeout(60):
        while True:
            loads = await fleet.loads()
            if sum(load.ready_workers for load in loads if load is not None) == workers:
                return
            await asyncio.sleep(0.05)


async def under_load(
    fleet: Fleet, asked: list[Question], name: str, faults: Faults, worker: tuple[str, ...]
) -> tuple[float, float]:
    """Byte-equal answers; how much longer than undisturbed their longest pause is, and how long a
    fresh start took."""
    want = await undisturbed(fleet, asked)
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    await load.reached(CLIENTS)
    start = max([await start_seconds(worker) for _ in range(2)])
    await faults(load)
    await load.reached(load.done + CLIENTS)
    load.stop()
    got = await running
    report(f"{name}; a fresh start took {start:.2f} s", asked, got, want)
    check(fleet, asked, got, want)
    await rest(fleet, workers=len(fleet.names("worker")))
    pauses = [max(answer.pause for answer in answers) for answers in (got, want)]
    return pauses[0] - pauses[1], start


async def test_a_worker_is_killed_while_another_drains(requests: int) -> None:
    """Nobody takes sequences then; both are back as soon as they can start."""
    asked = questions(requests)
    async with running_fleet(workers=2) as fleet:

        async def faults(load: Load) -> None:
            for number in range(ROUNDS):
                drained, killed = f"worker-{number % 2}", f"worker-{1 - number % 2}"
                fleet.signal(drained, signal.SIGTERM)
                await asyncio.sleep(0.1 * (number + 1))
                fleet.signal(killed, signal.SIGKILL)
                await asyncio.sleep(0.5)
                await until_ready(fleet, 2)

        pause, start = await under_load(
            fleet, asked, "killed while another drains", faults, SIMULATED
        )
        assert pause <= MAX_SERVED_DELAY + 2 * start + SLACK_SECONDS


async def test_workers_are_killed_while_they_copy_blocks(requests: int) -> None:
    """What was in the host's memory is gone, too, and is computed again."""
    asked = questions(requests)
    patient = ("--max-waiting-seconds=60",)
    async with running_fleet(1, worker_command=HOST_MEMORY, scheduler_flags=patient) as fleet:
        copied = 0.0

        async def faults(load: Load) -> None:
            nonlocal copied
            for _ in range(ROUNDS):
                await load.reached(load.done + CLIENTS)
                copied += fleet.metric("worker-0", "pagewire_worker_(saved|loaded)_blocks_total")
                fleet.signal("worker-0", signal.SIGKILL)
                await asyncio.sleep(0.5)
                await until_ready(fleet, 1)

        pause, start = await under_load(fleet, asked, "killed while copying", faults, HOST_MEMORY)
        print(f"{copied:.0f} blocks were copied")
        assert copied > 0
        assert pause <= MAX_SERVED_DELAY + start + SLACK_SECONDS


@pytest.mark.parametrize("at_once", [1, 2])
async def test_connections_are_cut_frozen_and_slow(requests: int, at_once: int) -> None:
    """There is always another way: a stream waits until each fault that it meets is noticed."""
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    print(f"\nseed {seed}; repeat with CHAOS_SEED={seed}")
    rng, asked = random.Random(seed), questions(requests)
    async with running_fleet(workers=4, schedulers=2, gateways=2) as fleet:

        async def one(proxy: TcpProxy, kind: str) -> None:
            print(f"{kind} {proxy.target}")
            if kind == "cut":
                proxy.cut()
            elif kind == "freeze":
                await proxy.freeze(2 * NOTICE_SECONDS)
            else:
                await proxy.slow(NOTICE_SECONDS)

        async def faults(load: Load) -> None:
            for number in range(ROUNDS):
                kinds = ["freeze" if number % 2 else rng.choice(["cut", "slow"])]
                kinds += rng.choices(["cut", "freeze", "slow"], k=at_once - 1)
                async with asyncio.TaskGroup() as group:
                    for proxy, kind in zip(rng.sample(fleet.proxies, at_once), kinds, strict=True):
                        group.create_task(one(proxy, kind))
                await until_ready(fleet, 4)

        name = f"{at_once} connections at once cut, frozen or slow"
        pause, _ = await under_load(fleet, asked, name, faults, SIMULATED)
        assert pause <= at_once * (NOTICE_SECONDS + RECONNECT_SECONDS) + SLACK_SECONDS
