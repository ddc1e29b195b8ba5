"""Links to workers while the list of addresses and its names change."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.addresses import Address
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.scheduler.workers.membership import Workers
from pagewire.v1 import worker_pb2 as pb
from support.scripted.scripted_worker import ScriptedWorker
from support.waiting import eventually

NAME = Address("dns:workers:1", "workers", 1)


class Events:
    """Records the events of links; leaves a worker as soon as it drains."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_ready(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        self.told.append("ready")

    def on_result(self, link: WorkerLink, result: pb.StepResult) -> None:
        raise AssertionError("no step was sent")

    def on_draining(self, link: WorkerLink) -> None:
        self.told.append("draining")
        link.leave()

    def on_serving(self, link: WorkerLink) -> None:
        self.told.append("serving")

    def on_lost(self, link: WorkerLink) -> None:
        self.told.append("lost")


class Listed:
    """Workers behind a name that resolves to the test's addresses."""

    def __init__(self) -> None:
        self.events = Events()
        self.answer: list[str] | None = []
        self.workers = Workers([NAME], self.events, 30.0, self._resolve)

    async def _resolve(self, address: Address) -> list[str]:
        if self.answer is None:
            raise socket.gaierror("no such name")
        return self.answer

    async def list(self, *targets: str) -> None:
        self.answer = list(targets)
        await self.workers.refresh()

    @property
    def known(self) -> set[str]:
        return set(self.workers._links)


@pytest.fixture
async def listed() -> AsyncIterator[Listed]:
    listed = Listed()
    yield listed
    for task in list(listed.workers._tasks.values()):
        task.cancel()


class Taken(ScriptedWorker):
    """A worker that another scheduler takes over at once."""

    async def Run(self, requests: Any, context: Any) -> AsyncIterator[pb.RunResponse]:  # noqa: N802
        yield pb.RunResponse(ready=self.info)
        await context.abort(grpc.StatusCode.ABORTED, "taken over")


async def test_known_workers_stay_while_no_name_resolves(listed: Listed, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/no-worker"
    await listed.list(target)
    listed.answer = None
    await listed.workers.refresh()
    assert listed.known == {target}


async def test_a_removed_worker_that_was_never_there_is_forgotten(
    listed: Listed, tmp_path: Path
) -> None:
    await listed.list(f"unix:{tmp_path}/no-worker")
    await listed.list()
    await eventually(lambda: not listed.known)


async def test_a_removed_worker_is_left_and_may_come_back(listed: Listed, tmp_path: Path) -> None:
    worker, target = ScriptedWorker(pb.WorkerInfo()), f"unix:{tmp_path}/worker"
    await worker.start(target)
    for _ in range(2):
        listed.events.told.clear()
        await listed.list(target)
        await eventually(lambda: listed.events.told == ["ready"])
        await listed.list()
        await eventually(lambda: not listed.known)
        assert listed.events.told == ["ready", "draining", "lost"]
    await worker.stop()


async def test_a_worker_of_another_scheduler_is_not_taken_back(
    listed: Listed, tmp_path: Path
) -> None:
    worker, target = Taken(pb.WorkerInfo()), f"unix:{tmp_path}/worker"
    await worker.start(target)
    await listed.list(target)
    await eventually(lambda: listed.events.told == ["ready", "lost"])
    await eventually(lambda: not listed.workers._tasks)
    await listed.workers.refresh()
    assert not listed.workers._tasks, "it stays with the other scheduler"
    await listed.list()
    assert not listed.known
    await listed.list(target)
    await eventually(lambda: listed.events.told[2:] == ["ready", "lost"])
    await worker.stop()
