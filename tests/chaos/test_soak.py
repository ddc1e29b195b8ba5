"""Faults again and again under mixed load: nothing is lost, and nothing is left behind.

`make soak` runs it for half an hour with a fault every ten seconds.
"""

import asyncio
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagewire.bench.results import figures_of, without_folders, write_rows
from support.clients.load import Load, mixed_questions
from support.processes.faults import Faults
from support.processes.fleet import Fleet, running_fleet
from support.processes.trial import CLIENTS, check, figures, report, rest, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(0)]

WORKERS = 4
# A process is looked at this often, and has taken what it needs for its load after so long.
LOOK_SECONDS, WARM_SECONDS = 5.0, 30.0
# What a process may keep of a load that is over: arenas, caches, connections that linger.
MEMORY_FACTOR, MEMORY_SLACK = 1.1, 12 << 20
DESCRIPTOR_SLACK = 24
TASK_SLACK = 4  # a health check or a connection that is about to end


async def test_faults_leave_nothing_behind(
    requests: int, minutes: float, soak_output: Path | None
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    asked = mixed_questions(requests, seed)
    interval = 10.0 if minutes > 2 else 3.0
    async with running_fleet(WORKERS, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        await rest(fleet, WORKERS)
        before = Held.by(fleet)
        lives = Lives(fleet)
        looking = asyncio.create_task(lives.look_on())
        faults = Faults(fleet, random.Random(seed))
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await faults.some(round(60 * minutes / interval), interval)
        load.stop()
        got = await running
        looking.cancel()
        print(f"\nseed {seed}, {len(faults.done)} faults in {minutes:g} minutes: {faults.kinds()}")
        report("soak", asked, got, want)
        check(fleet, asked, got, want)
        await rest(fleet, WORKERS)
        await asyncio.sleep(2)
        after = Held.by(fleet)
        for line in lives.lines():
            print(line)
        if soak_output is not None:
            result = {
                "faults": len(faults.done),
                "faults_by_kind": faults.kinds(),
                **figures(asked, got, want),
                "open_requests_left": sum(int(held.open_requests) for held in after.values()),
                "tasks": {
                    name: {"begin": int(before[name].tasks), "end": int(held.tasks)}
                    for name, held in after.items()
                },
                "longest_life": lives.longest(),
            }
            words = [f"CHAOS_SEED={seed}", "pytest", *without_folders(sys.argv[1:])]
            write_rows(soak_output, figures_of(result), " ".join(words))
        for name, held in after.items():
            assert held.open_requests == 0, (name, held)
            assert held.tasks <= before[name].tasks + TASK_SLACK, (name, held, before[name])
        lives.check()


@dataclass(frozen=True)
class Held:
    """What a process at rest holds, by its own account. One that was started again holds the same
    as the one before it."""

    open_requests: float
    tasks: float

    @classmethod
    def by(cls, fleet: Fleet) -> "dict[str, Held]":
        """What each process holds now."""
        return {
            name: cls(
                fleet.metric(name, r"pagewire_\w+_open_requests.*"),
                fleet.metric(name, "pagewire_tasks"),
            )
            for name in fleet.metrics
        }


@dataclass
class Life:
    """What was seen of one process; the first look counts that finds it warm."""

    seen: float
    began: float = 0.0
    memory: tuple[int, int] = (0, 0)
    descriptors: tuple[int, int] = (0, 0)
    seconds: float = 0.0


class Lives:
    """Memory and descriptors of every process under load, from when it is warm to its end."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lives: dict[tuple[str, int], Life] = {}

    async def look_on(self) -> None:
        """Looks at all of them again and again, until cancelled."""
        while True:
            self._look(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self, now: float) -> None:
        for name, pid in self._fleet.supervisor.pids.items():
            life = self._lives.setdefault((name, pid), Life(now))
            if now - life.seen < WARM_SECONDS:
                continue
            try:
                memory, descriptors = self._fleet.resident(pid), self._fleet.open_files(pid)
            except OSError:  # it has just ended
                continue
            if not life.began:
                life.began, life.memory, life.descriptors = now, (memory,) * 2, (descriptors,) * 2
            life.memory = (life.memory[0], memory)
            life.descriptors = (life.descriptors[0], descriptors)
            life.seconds = now - life.began

    def result(self) -> list[dict[str, Any]]:
        """All that lived for long enough to be looked at twice."""
        return [
            {
                "process": name,
                "seconds": round(life.seconds),
                "resident_mib": [round(memory / 2**20, 1) for memory in life.memory],
                "descriptors": list(life.descriptors),
            }
            for (name, _), life in sorted(self._lives.items())
            if life.seconds
        ]

    def longest(self) -> dict[str, dict[str, Any]]:
        """The longest life of each name; lists are the begin and the end."""
        longest: dict[str, dict[str, Any]] = {}
        for life in self.result():
            if life["seconds"] >= longest.get(life["process"], life)["seconds"]:
                longest[life["process"]] = life
        return longest

    def lines(self) -> list[str]:
        """The longest life of each name, as text."""
        return [
            "{process}: in {seconds} s {resident_mib[0]} -> {resident_mib[1]} MiB, "
            "{descriptors[0]} -> {descriptors[1]} descriptors".format(**life)
            for life in self.longest().values()
        ]

    def check(self) -> None:
        """Nobody has grown."""
        for (name, pid), life in self._lives.items():
            assert life.memory[1] <= MEMORY_FACTOR * life.memory[0] + MEMORY_SLACK, (
                name,
                pid,
                life,
            )
            assert life.descriptors[1] <= life.descriptors[0] + DESCRIPTOR_SLACK, (name, pid, life)
