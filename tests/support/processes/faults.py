"""Faults at random moments: what breaks, and how it is mended."""

import asyncio
import random
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from support.processes.fleet import Fleet

STOPPED_SECONDS = 7.0  # longer than anybody waits for a sign of life
SHORTLY_SECONDS = 1.0  # not long enough to be noticed


@dataclass
class Faults:
    """Breaks one thing after another in a fleet; `done` says what it was."""

    fleet: Fleet
    rng: random.Random
    done: list[str] = field(default_factory=list)

    def kinds(self) -> dict[str, int]:
        """How often each kind of fault was there."""
        names = r"(-\d\b)|( to \S+)"
        return dict(Counter(re.sub(names, "", what) for what in self.done))

    async def one(self) -> None:
        """One fault; returns when what can be mended is mended."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill,
            self._terminate,
            self._stop,
            self._stop_shortly,
            self._cut,
            self._freeze,
            self._slow,
        ]
        await self.rng.choice(kinds)()

    async def some(self, count: int, interval: float) -> None:
        """So many faults, one each interval; those that take longer overlap."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await asyncio.sleep(interval * self.rng.uniform(0.5, 1.5))
                group.create_task(self.one())

    async def _kill(self) -> None:
        name = self._victim("worker", "scheduler")
        self._note(f"kill -9 {name}")
        self.fleet.signal(name, signal.SIGKILL)

    async def _terminate(self) -> None:
        name = self._victim("worker", "scheduler")
        self._note(f"SIGTERM {name}")
        self.fleet.signal(name, signal.SIGTERM)

    async def _stop(self) -> None:
        await self._stop_for(STOPPED_SECONDS)

    async def _stop_shortly(self) -> None:
        await self._stop_for(SHORTLY_SECONDS)

    async def _stop_for(self, seconds: float) -> None:
        name = self._victim("worker", "scheduler", "gateway")
        self._note(f"SIGSTOP {name} for {seconds:g} s")
        self.fleet.signal(name, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.fleet.signal(name, signal.SIGCONT)

    async def _cut(self) -> None:
        proxy = self.rng.choice(self.fleet.proxies)
        self._note(f"connections to {proxy.target} cut")
        proxy.cut()

    async def _freeze(self) -> None:
        proxy = self.rng.choice(self.fleet.proxies)
        self._note(f"connections to {proxy.target} frozen for {STOPPED_SECONDS:g} s")
        await proxy.freeze(STOPPED_SECONDS)

    async def _slow(self) -> None:
        proxy = self.rng.choice(self.fleet.proxies)
        self._note(f"connections to {proxy.target} slow for {STOPPED_SECONDS:g} s")
        await proxy.slow(STOPPED_SECONDS)

    def _victim(self, *kinds: str) -> str:
        """A process that runs and is not stopped already."""
        names = [name for kind in kinds for name in self.fleet.names(kind)]
        return self.rng.choice(sorted(set(names) - self.fleet.stopped))

    def _note(self, what: str) -> None:
        self.done.append(what)
