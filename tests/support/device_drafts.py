"""A worker on a CPU that drafts and runs ahead of its results like a worker on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pagewire.worker.protocol.backend import LoadedWorker, Outcome
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime import eager
from pagewire.worker.runtime.timer import HostTimer
from support.models import host_graphs
from support.models.host_graphs import HostGraphBackend, with_host_graphs


class RunsAhead(HostGraphBackend):
    """The driver reads a result after it has submitted another step, as on a GPU."""

    synchronous = False

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
            # The timeout is for results that the driver or a mask needs before the next step.
            self._submitted.wait_for(lambda: self._number > number, timeout=0.03)
        return super().wait(handle)

    def _to_host(self, results: Tensor) -> Tensor:
        return results.clone()


def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[LoadedWorker], LoadedWorker]:
    """Returns a function that makes a loaded CPU worker draft like one on a GPU."""
    as_graphs = with_host_graphs(monkeypatch)
    monkeypatch.setattr(host_graphs, "HostGraphBackend", RunsAhead)
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
