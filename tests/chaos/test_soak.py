"""Faults under mixed load for a long time: answers stay the same, and nothing leaks.

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
from support.processes.fleet_checks import (
    CLIENTS,
    check_answers,
    figures,
    report,
    undisturbed,
    until_idle,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(0)]

WORKERS = 4
# Seconds between samples of processes, and seconds after which their memory counts as warm.
SAMPLE_SECONDS, WARM_SECONDS = 5.0, 30.0
# Growth without a leak: arenas, caches, connections that are about to close.
MEMORY_FACTOR, MEMORY_SLACK = 1.1, 12 << 20
DESCRIPTOR_SLACK = 24
TASK_SLACK = 4  # a health check or a connection that is about to end


async def test_faults_leak_nothing(requests: int, minutes: float, soak_output: Path | None) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
    asked = mixed_questions(requests, seed)
    interval = 10.0 if minutes > 2 else 3.0
    async with running_fleet(WORKERS, schedulers=2, gateways=2) as fleet:
        want = await undisturbed(fleet, asked)
        await until_idle(fleet, WORKERS)
        before = OpenWork.of_fleet(fleet)
        history = ProcessHistory(fleet)
        sampling = asyncio.create_task(history.run())
        faults = Faults(fleet, random.Random(seed))
        load = Load(fleet.urls, asked, CLIENTS, endless=True)
        running = asyncio.create_task(load.run())
        await faults.some(round(60 * minutes / interval), interval)
        load.stop()
        got = await running
        sampling.cancel()
        print(f"\nseed {seed}, {len(faults.done)} faults in {minutes:g} minutes: {faults.kinds()}")
        report("soak", asked, got, want)
        check_answers(fleet, asked, got, want)
        await until_idle(fleet, WORKERS)
        after = await settled(fleet, before)
        for line in history.lines():
            print(line)
        if soak_output is not None:
            result = {
                "faults": len(faults.done),
                "faults_by_kind": faults.kinds(),
                **figures(asked, got, want),
                "open_requests_left": sum(int(work.open_requests) for work in after.values()),
                "tasks": {
                    name: {"begin": int(before[name].tasks), "end": int(work.tasks)}
                    for name, work in after.items()
                },
                "longest_life": history.longest(),
            }
            words = [f"CHAOS_SEED={seed}", "pytest", *without_folders(sys.argv[1:])]
            write_rows(soak_output, figures_of(result), " ".join(words))
        assert leaked(before, after) == [], (before, after)
        history.check()


@dataclass(frozen=True)
class OpenWork:
    """Open requests and tasks of an idle process, from its metrics."""

    open_requests: float
    tasks: float

    @classmethod
    def of_fleet(cls, fleet: Fleet) -> "dict[str, OpenWork]":
        """The open work of each process, by name."""
        return {
            name: cls(
                fleet.metric(name, r"pagewire_\w+_open_requests.*"),
                fleet.metric(name, "pagewire_tasks"),
            )
            for name in fleet.metrics
        }


def leaked(before: dict[str, OpenWork], after: dict[str, OpenWork]) -> list[str]:
    """Names of processes with open requests, or with more tasks than before."""
    return [
        name
        for name, work in after.items()
        if work.open_requests or work.tasks > before[name].tasks + TASK_SLACK
    ]


async def settled(
    fleet: Fleet, before: dict[str, OpenWork], seconds: float = 10.0
) -> dict[str, OpenWork]:
    """The open work once nothing leaks, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while leaked(before, after := OpenWork.of_fleet(fleet)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return after


@dataclass
class Life:
    """Samples of one process, first and last; the first is taken when it is warm."""

    first_seen: float
    began: float = 0.0
    memory: tuple[int, int] = (0, 0)
    descriptors: tuple[int, int] = (0, 0)
    seconds: float = 0.0


class ProcessHistory:
    """Memory and descriptors of every process, from when it is warm to its end."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lives: dict[tuple[str, int], Life] = {}

    async def run(self) -> None:
        """Samples all processes until it is cancelled."""
        while True:
            self._sample(time.monotonic())
            await asyncio.sleep(SAMPLE_SECONDS)

    def _sample(self, now: float) -> None:
        for name, pid in self._fleet.supervisor.pids.items():
            life = self._lives.setdefault((name, pid), Life(now))
            if now - life.first_seen < WARM_SECONDS:
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
        """All processes with at least two samples."""
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
        """The longest life of each name; lists hold the first and the last sample."""
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
        """AssertionError if a process has grown."""
        for (name, pid), life in self._lives.items():
            assert life.memory[1] <= MEMORY_FACTOR * life.memory[0] + MEMORY_SLACK, (
                name,
                pid,
                life,
            )
            assert life.descriptors[1] <= life.descriptors[0] + DESCRIPTOR_SLACK, (name, pid, life)
