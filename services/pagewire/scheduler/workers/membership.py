"""The workers that a scheduler connects to: they join and leave while it runs."""

import asyncio
import logging
from collections.abc import Sequence

from pagewire.addresses import Address, Resolve, resolve
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.targets import Targets
from pagewire.scheduler.workers.link import WorkerEvents, WorkerLink
from pagewire.scheduler.workers.shared_workers import SharedWorkers

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0


class Workers:
    """A link to each worker address that is listed, or that a listed name resolves to."""

    def __init__(
        self,
        addresses: Sequence[Address],
        events: WorkerEvents,
        grace: float,
        resolve_names: Resolve = resolve,
        credentials: Credentials = NO_CREDENTIALS,
        step_timeout: float = 60.0,
        shared: SharedWorkers | None = None,
    ) -> None:
        """`grace`: seconds for the sequences of a removed worker; `step_timeout`: for a step.

        `shared`: other schedulers use the same workers, and each holds a part of them.
        """
        self._shared = shared
        self._events = events
        self._grace = grace
        self._step_timeout = step_timeout
        self._credentials = credentials
        self._targets = Targets(addresses, resolve_names, log)
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._faults: asyncio.Queue[BaseException] = asyncio.Queue()

    async def run(self) -> None:
        """Runs until it is cancelled or a link fails with an error; then closes every link."""
        try:
            while True:
                await self.refresh()
                try:
                    fault = await asyncio.wait_for(self._faults.get(), RESOLVE_SECONDS)
                except TimeoutError:
                    continue
                raise fault
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def stop_sharing(self) -> None:
        """Stops waiting for workers. Those that this scheduler holds stay."""
        if self._shared is None:
            return
        self._shared.close()
        for link, task in self._tasks.items():
            if not link.connected:
                task.cancel()

    async def refresh(self) -> None:
        """Resolves the names again, links to new workers and removes those that are gone."""
        wanted = await self._targets.refresh()
        for target in sorted(wanted - self._links.keys()):
            self._add(target)
        for target in sorted(self._links.keys() - wanted):
            self._remove(self._links[target])

    def _add(self, target: str) -> None:
        link = WorkerLink(target, self._events, self._credentials, self._step_timeout, self._shared)
        self._links[target] = link
        task = asyncio.create_task(link.run(), name=f"worker {target}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._forget(link))

    def _remove(self, link: WorkerLink) -> None:
        """Drains the worker; sequences that are left after the grace run elsewhere."""
        if link.retired:
            return
        log.info("worker %s is no longer listed", link.address)
        link.retire()
        task = self._tasks.get(link)
        if task is None:
            del self._links[link.address]
        elif link.connected:
            asyncio.get_running_loop().call_later(self._grace, task.cancel)
        else:
            task.cancel()

    def _forget(self, link: WorkerLink) -> None:
        """A link has ended.

        If another scheduler took the worker, its address stays known while it is listed. Otherwise
        both schedulers would take the worker from each other in turns.
        """
        task = self._tasks.pop(link)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._faults.put_nowait(fault)
        if link.retired:
            del self._links[link.address]
