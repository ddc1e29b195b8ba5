"""Random faults of a fleet: processes and connections fail and recover."""

import asyncio
import random
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from support.processes.fleet import Fleet

PAUSE_SECONDS = 7.0  # longer than a peer waits for a heartbeat
SHORT_PAUSE_SECONDS = 1.0  # too short to be detected


@dataclass
class Faults:
    """Causes faults in a fleet; `done` lists them."""

    fleet: Fleet
    rng: random.Random
    done: list[str] = field(default_factory=list)

    def kinds(self) -> dict[str, int]:
        """The number of faults of each kind."""
        names = r"(-\d\b)|( to \S+)"
        return dict(Counter(re.sub(names, "", what) for what in self.done))

    async def one(self) -> None:
        """Causes one fault; returns when it is over."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill,
            self._terminate,
            self._pause,
            self._pause_shortly,
            self._cut,
            self._freeze,
            self._slow,
        ]
        await self.rng.choice(kinds)()

    async def some(self, count: int, interval: float) -> None:
        """Causes `count` faults, one in each interval of seconds; longer ones overlap."""
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

    async def _pause(self) -> None:
        await self._pause_for(PAUSE_SECONDS)

    async def _pause_shortly(self) -> None:
        await self._pause_for(SHORT_PAUSE_SECONDS)

    async def _pause_for(self, seconds: float) -> None:
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
        self._note(f"connections to {proxy.target} frozen for {PAUSE_SECONDS:g} s")
        await proxy.freeze(PAUSE_SECONDS)

    async def _slow(self) -> None:
        proxy = self.rng.choice(self.fleet.proxies)
        self._note(f"connections to {proxy.target} slow for {PAUSE_SECONDS:g} s")
        await proxy.slow(PAUSE_SECONDS)

    def _victim(self, *kinds: str) -> str:
        """A random process that runs and is not paused."""
        names = [name for kind in kinds for name in self.fleet.names(kind)]
        return self.rng.choice(sorted(set(names) - self.fleet.stopped))

    def _note(self, what: str) -> None:
        self.done.append(what)
