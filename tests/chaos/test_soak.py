"""Faults again and again under mixed load: nothing is lost, and nothing is left behind.

`make soak` runs it for half an hour with a fault every ten seconds.
"""

import asyncio
import random
import time

import pytest

from support.faults import Faults
from support.fleet import Fleet, running_fleet
from support.load import Load, mixed_questions
from support.trial import CLIENTS, check, report, rest, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(0)]

WORKERS = 4
# What a service may keep of a load that is over: arenas, caches, connections that linger.
MEMORY_FACTOR, MEMORY_SLACK = 1.25, 24 << 20
DESCRIPTOR_SLACK = 24


async def test_faults_leave_nothing_behind(requests: int, minutes: float) -> None:
    seed = random.randrange(1000)
    asked = mixed_questions(requests, seed)
    interval = 10.0 if minutes > 2 else 3.0
    async with running_fleet(WORKERS, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        await rest(fleet, WORKERS)
        before = Remains.of(fleet)
        faults = Faults(fleet, random.Random(seed))
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            await faults.some(1, interval)
        load.stop()
        got = await running
        print(f"\nseed {seed}, {len(faults.done)} faults in {minutes:g} minutes: {faults.kinds()}")
        report("soak", got, want)
        check(fleet, asked, got, want)
        await rest(fleet, WORKERS)
        await asyncio.sleep(2)
        Remains.of(fleet).compare(before)


class Remains:
    """What the processes of a fleet at rest hold, by process id: those that were started again
    are others."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, int], int] = {}
        self.descriptors: dict[tuple[str, int], int] = {}
        self.open_requests: dict[str, float] = {}

    @classmethod
    def of(cls, fleet: Fleet) -> "Remains":
        """What they hold now."""
        found = cls()
        memory, descriptors = fleet.resident_bytes(), fleet.descriptors()
        for name, pid in fleet.supervisor.pids.items():
            found.memory[name, pid] = memory[name]
            found.descriptors[name, pid] = descriptors[name]
        for name in fleet.metrics:
            found.open_requests[name] = fleet.metric(name, r"pagewire_\w+_open_requests.*")
        return found

    def compare(self, before: "Remains") -> None:
        """Nothing is open, and whoever lived through it all has not grown."""
        assert set(self.open_requests.values()) == {0}, self.open_requests
        survivors = self.memory.keys() & before.memory.keys()
        for process in sorted(survivors):
            old, new = before.memory[process], self.memory[process]
            fds = before.descriptors[process], self.descriptors[process]
            print(f"{process[0]}: {old >> 20} -> {new >> 20} MiB, {fds[0]} -> {fds[1]} descriptors")
            assert new < MEMORY_FACTOR * old + MEMORY_SLACK, process
            assert fds[1] <= fds[0] + DESCRIPTOR_SLACK, process
