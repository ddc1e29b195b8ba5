"""Keeps a set of service processes running: start, restart, orderly end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import until_healthy
from pagewire.cli.launch.processes import ChildProcess, describe_end
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials

# A process that has been ready is started again at once, others wait for it. Delays grow only while
# it ends again and again: less if it gets ready in between, for then each start has been of use.
FIRST_RESTART_DELAY = 1.0
LONGEST_SERVED_DELAY = 2.0
LONGEST_RESTART_DELAY = 30.0
# A process that was ready for this long is taken to be sound.
SOUND_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    # Where its health is asked, see pagewire.cli.launch.health.
    health: str
    # Seconds from SIGTERM to SIGKILL.
    grace: float
    # For a health check by gRPC.
    credentials: Credentials = field(default=NO_CREDENTIALS, repr=False)
    # Added to the environment that it inherits.
    environment: Mapping[str, str] = field(default_factory=dict)


# Receives the name of a service and a line that it wrote, or `SUPERVISOR` and what happened.
Report = Callable[[str, str], None]
SUPERVISOR = "pagewire"


class Supervisor:
    """Runs services in tiers: started all at once, ended tier by tier from the last to the first,
    so that nothing ends before what depends on it."""

    def __init__(self, tiers: Sequence[Sequence[Service]], report: Report) -> None:
        self._tiers = tiers
        self._report = report
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run, by service name."""
        return {name: child.pid for name, child in self._children.items() if child.running}

    async def start(self) -> None:
        """Starts every service and waits until all are ready.

        CommandError when one ends before that; all have been ended by then.
        """
        try:
            await self._start(self._services())
        except BaseException:
            await self.stop()
            raise
        self._keepers = [asyncio.create_task(self._keep(s)) for s in self._services()]

    async def stop(self) -> None:
        """Ends all: SIGTERM with each service's grace, then SIGKILL."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for tier in reversed(self._tiers):
            await asyncio.gather(*(self._stop_one(service) for service in tier))

    def kill(self) -> None:
        """SIGKILL to all, now."""
        for child in self._children.values():
            child.kill()

    def _services(self) -> list[Service]:
        return [service for tier in self._tiers for service in tier]

    async def _start(self, services: Sequence[Service]) -> None:
        """Spawns services; returns when all are ready, CommandError when one ends before."""
        for service in services:
            await self._spawn(service)
        ended = [asyncio.create_task(self._children[s.name].wait()) for s in services]
        ready = asyncio.create_task(_all_healthy(services))
        try:
            await asyncio.wait([ready, *ended], return_when=asyncio.FIRST_COMPLETED)
            # A service that ended is not ready, whoever answered in its place.
            for service, task in zip(services, ended, strict=True):
                if task.done():
                    child = self._children[service.name]
                    raise CommandError(_obituary(service.name, task.result(), child))
            ready.result()
        finally:
            ready.cancel()
            for task in ended:
                task.cancel()

    async def _spawn(self, service: Service) -> None:
        self._children[service.name] = await ChildProcess.start(
            service.command,
            service.environment,
            lambda line: self._report(service.name, line),
        )

    async def _stop_one(self, service: Service) -> None:
        child = self._children.get(service.name)
        if child is not None:
            await child.stop(service.grace)

    async def _keep(self, service: Service) -> None:
        """Restarts a service whenever it ends."""
        ends, ready_at = 0, time.monotonic()
        served = True
        while True:
            status = await self._children[service.name].wait()
            if served and time.monotonic() - ready_at > SOUND_AFTER:
                ends = 0
            delay = restart_delay(ends, served)
            when = f" in {delay:g} s" if delay else ""
            self._say(f"{service.name} {describe_end(status)}; starting it again{when}")
            await asyncio.sleep(delay)
            ends += 1
            served = False
            try:
                await self._start([service])
                self._say(f"{service.name} is ready again")
                served, ready_at = True, time.monotonic()
            except CommandError:
                continue  # the next round reports its end
            except OSError as error:  # such as no memory for a process: that may pass
                self._say(f"{service.name} cannot be started: {error}")

    def _say(self, text: str) -> None:
        self._report(SUPERVISOR, text)


def restart_delay(ends: int, served: bool) -> float:
    """Seconds until a process is started again that has ended `ends` times before in a row, the
    last time after it had `served`, or before it was ready."""
    if ends == 0:
        return 0.0
    longest = LONGEST_SERVED_DELAY if served else LONGEST_RESTART_DELAY
    return min(FIRST_RESTART_DELAY * 2.0 ** min(ends - 1, 10), longest)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    """Services that are ready inside the block and have ended after it."""
    await supervisor.start()
    try:
        yield
    finally:
        await supervisor.stop()


async def _all_healthy(services: Sequence[Service]) -> None:
    await asyncio.gather(
        *(until_healthy(service.health, service.credentials) for service in services)
    )


def _obituary(name: str, status: int, child: ChildProcess) -> str:
    lines = "\n".join(f"  {line}" for line in child.tail)
    return (
        f"{name} {describe_end(status)} before it was ready. Its last lines:\n{lines or '  (none)'}"
    )
