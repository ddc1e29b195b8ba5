"""A worker on a CPU that drafts and runs ahead of its results like a worker on a GPU."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.worker.protocol.backend import LoadedWorker, Outcome
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime import eager
from pagewire.worker.runtime.timer import HostTimer
from support.models.host_graphs import HostGraphBackend, with_host_graphs
from support.models.step_driver import LocalWorker, local_worker


class RunsAhead(HostGraphBackend):
    """The driver reads a result after it has submitted another step, as on a GPU."""

    synchronous = False
    # Seconds to wait for another step; also for results that the driver or a mask needs before it.
    patience = 0.03

    def __init__(self, *arguments: Any) -> None:
        self._submitted = threading.Condition()
        self._numbers: dict[int, int] = {}
        self._number = 0
        super().__init__(*arguments)
        self.synchronous = False

    def submit(self, plan: DevicePlan) -> Any:
        handle = super().submit(plan)
        with self._submitted:
            self._number += 1
            self._numbers[id(handle)] = self._number
            self._submitted.notify_all()
        return handle

    def wait(self, handle: Any) -> Outcome:
        with self._submitted:
            number = self._numbers.pop(id(handle))
            self._submitted.wait_for(lambda: self._number > number, timeout=self.patience)
        return super().wait(handle)

    def _to_host(self, results: Tensor) -> Tensor:
        return results.clone()


def one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that sends no step before it has the last result: to wait would be in vain."""
    monkeypatch.setattr(RunsAhead, "patience", 0.0)


def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[LoadedWorker], LoadedWorker]:
    """Returns a function that makes a loaded CPU worker draft like one on a GPU."""
    as_graphs = with_host_graphs(monkeypatch, RunsAhead)
    monkeypatch.setattr(eager, "DeviceTimer", HostTimer)

    def adapt(loaded: LoadedWorker) -> LoadedWorker:
        limits = replace(loaded.limits, drafts_on_device=True)
        loaded = as_graphs(replace(loaded, limits=limits))
        measured = loaded.backend.row_costs
        assert measured is not None
        assert (measured.seconds > 0).all()
        passes = None if measured.passes is None else np.zeros(len(measured.rows))
        costs = RowCosts(measured.rows, np.ones(len(measured.rows)), 0.0, passes)
        loaded.backend.row_costs = costs
        return loaded

    return adapt


class SharedWorker:
    """A worker that the tests of a module use one after the other.

    A start runs every graph, which takes longer than a test. Slots and drafters belong to a stream,
    so nothing of an earlier test remains in a new stream.
    """

    def __init__(self, adapt: Callable[[LoadedWorker], LoadedWorker]) -> None:
        self._adapt = adapt
        self._stack = AsyncExitStack()
        self._asked: tuple[Path, dict[str, Any]] | None = None
        self._worker: LocalWorker | None = None

    async def get(self, folder: Path, **settings: Any) -> LocalWorker:
        """The previous test's worker if it has this model and these settings, or a new one.

        Its KV caches are empty, as those of a new worker are.
        """
        asked = folder, settings
        if self._worker is None or asked != self._asked or self._worker.fatal:
            await self.stop()
            starting = local_worker(folder, self._adapt, **settings)
            self._worker, self._asked = await self._stack.enter_async_context(starting), asked
        with torch.inference_mode():
            for cache in self._worker.loaded.backend._caches:
                cache.storage.zero_()
        return self._worker

    async def stop(self) -> None:
        """Ends the worker, if there is one."""
        self._worker = None
        await self._stack.aclose()


@asynccontextmanager
async def drafting_worker() -> AsyncIterator[SharedWorker]:
    """A shared worker that drafts like one on a GPU, for the fixture of a module."""
    with pytest.MonkeyPatch.context() as patch:
        shared = SharedWorker(drafting(patch))
        yield shared
        await shared.stop()
