"""Starts service processes, restarts those that end, and ends them in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import until_healthy
from pagewire.cli.launch.processes import ChildProcess, describe_end
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials

# Seconds. A process that ends is restarted at once. If it ends repeatedly, delays grow up to a
# maximum, which is lower for a process that was ready in between.
FIRST_RESTART_DELAY = 1.0
MAX_SERVED_DELAY = 2.0
MAX_RESTART_DELAY = 30.0
# After being ready for this long, a process starts again without delay.
STABLE_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    # Address of the health check, see pagewire.cli.launch.health.
    health: str
    # Seconds from SIGTERM to SIGKILL.
    grace: float
    # For health checks over gRPC.
    credentials: Credentials = field(default=NO_CREDENTIALS, repr=False)
    # Variables in addition to the environment of this process.
    environment: Mapping[str, str] = field(default_factory=dict)


# Called with the name of a service and a line of its output, or with SUPERVISOR and an event.
Report = Callable[[str, str], None]
SUPERVISOR = "pagewire"


class Supervisor:
    """Runs services in tiers. All start at once. They end tier by tier from the last to the first,
    so that no service ends before those that depend on it."""

    def __init__(
        self, tiers: Sequence[Sequence[Service]], report: Report, lines_are_shown: bool = False
    ) -> None:
        """With `lines_are_shown`, errors do not repeat the lines that `report` has received."""
        self._tiers = tiers
        self._report = report
        self._lines_are_shown = lines_are_shown
        self._children: dict[str, ChildProcess] = {}
        self._restarters: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running services, by name."""
        return {name: child.pid for name, child in self._children.items() if child.running}

    async def start(self) -> None:
        """Starts all services and waits until they are ready.

        CommandError if a service cannot be started or ends before it is ready; then all others are
        ended too.
        """
        try:
            await self._start(self._services())
        except OSError as error:
            await self.stop()
            raise CommandError(f"a service cannot be started: {error}") from error
        except BaseException:
            await self.stop()
            raise
        self._restarters = [asyncio.create_task(self._restart(s)) for s in self._services()]

    async def stop(self) -> None:
        """Ends all services: SIGTERM, and SIGKILL after the service's grace."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        for tier in reversed(self._tiers):
            await asyncio.gather(*(self._stop_one(service) for service in tier))

    def kill(self) -> None:
        """Sends SIGKILL to all services."""
        for child in self._children.values():
            child.kill()

    def hang_up(self) -> None:
        """Sends SIGHUP to all services: those with API keys read them again."""
        for child in self._children.values():
            child.hang_up()

    def kill_at(self, address: str) -> str | None:
        """Sends SIGKILL to the first tier's service at an address; returns its name, or None."""
        for service in self._tiers[0]:
            child = self._children.get(service.name)
            if service.health == address and child is not None and child.running:
                child.kill()
                return service.name
        return None

    def _services(self) -> list[Service]:
        return [service for tier in self._tiers for service in tier]

    async def _start(self, services: Sequence[Service]) -> None:
        """Starts services and waits until they are ready; CommandError if one ends first."""
        for service in services:
            await self._spawn(service)
        ended = [asyncio.create_task(self._children[s.name].wait()) for s in services]
        ready = asyncio.create_task(_all_healthy(services))
        try:
            await asyncio.wait([ready, *ended], return_when=asyncio.FIRST_COMPLETED)
            # Another process may have answered the health check of a service that ended.
            for service, task in zip(services, ended, strict=True):
                if task.done():
                    child = self._children[service.name]
                    tail = [] if self._lines_are_shown else list(child.tail)
                    raise CommandError(_start_failure(service.name, task.result(), tail))
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

    async def _restart(self, service: Service) -> None:
        """Restarts a service each time that it ends."""
        ends, ready_at = 0, time.monotonic()
        served = True
        while True:
            status = await self._children[service.name].wait()
            if served and time.monotonic() - ready_at > STABLE_AFTER:
                ends = 0
            delay = restart_delay(ends, served)
            when = f" in {delay:g} s" if delay else ""
            self._report_event(f"{service.name} {describe_end(status)}; starting it again{when}")
            await asyncio.sleep(delay)
            ends += 1
            served = False
            try:
                await self._start([service])
                self._report_event(f"{service.name} is ready again")
                served, ready_at = True, time.monotonic()
            except CommandError:
                continue  # the next round reports its end
            except OSError as error:  # for example too little memory; tried again later
                self._report_event(f"{service.name} cannot be started: {error}")

    def _report_event(self, text: str) -> None:
        self._report(SUPERVISOR, text)


def restart_delay(ends: int, served: bool) -> float:
    """Seconds to wait before a restart.

    `ends`: how often the process ended in a row before this time. `served`: whether it was ready in
    the last run.
    """
    if ends == 0:
        return 0.0
    longest = MAX_SERVED_DELAY if served else MAX_RESTART_DELAY
    return min(FIRST_RESTART_DELAY * 2.0 ** min(ends - 1, 10), longest)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    """Starts the services, which are ready inside the block, and ends them after it."""
    await supervisor.start()
    try:
        yield
    finally:
        await supervisor.stop()


async def _all_healthy(services: Sequence[Service]) -> None:
    await asyncio.gather(
        *(until_healthy(service.health, service.credentials) for service in services)
    )


def _start_failure(name: str, status: int, tail: Sequence[str]) -> str:
    """Why a service did not start; without a tail, the user has already seen its last lines."""
    ended = f"{name} {describe_end(status)} before it was ready"
    if not tail:
        return f"{ended}; its lines say why"
    return "\n".join([f"{ended}. Its last lines:", *(f"  {line}" for line in tail)])
