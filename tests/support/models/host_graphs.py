"""The graph backend on a CPU: its graphs are calls that run again when they are replayed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.measurement import timing
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.runtime.graphs import backend as graphs
from pagewire.worker.runtime.graphs import draft_passes, mask_gate, mixed, slot_changes
from pagewire.worker.runtime.graphs.backend import GraphBackend, Layers, Variant
from pagewire.worker.runtime.graphs.mask_gate import MaskGate
from pagewire.worker.runtime.timer import HostTimer
from pagewire.worker.startup.loading import LoadedWorker


class Replayed:
    """A graph: `replay` runs the call and writes its result into the first run's tensors."""

    def __init__(self, run: Callable[[], Tensor], out: Tensor) -> None:
        self._run, self._out = run, out

    def replay(self) -> None:
        self._out.copy_(self._run())


class CopiedAtOnce:
    """Stands in for `Staging`, which needs pinned memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        assert fill.size <= self.size
        target.view(-1).copy_(torch.from_numpy(fill.ravel()))


class CopiedResults:
    """Stands in for `ResultBuffers`, which needs pinned memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def copy(self, results: Tensor) -> Callable[[], Int32Array]:
        assert results.numel() <= self.size
        return results.clone().numpy


class HostBranch:
    """Stands in for `Branch`: its work is done at once, so the host waits for masks."""

    def __init__(self, _: torch.device) -> None:
        pass

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


class HostGate(MaskGate):
    """A gate whose memory is not pinned."""

    def _pin(self, memory: MaskMemory) -> None:
        pass


class HostCaptures:
    """Stands in for `Captures`."""

    def __enter__(self) -> "HostCaptures":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def whole(self, run: Callable[[], Tensor]) -> tuple[Replayed, Tensor]:
        out = run()
        return Replayed(run, out), out

    def start(self, run: Callable[[Callable[[], None]], Any]) -> "HostStart":
        return HostStart(partial(run, lambda: None))


class HostStart:
    """Stands in for `CapturedStart`: every replay runs the start again."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def continued(
        self, run: Callable[[Any], Tensor], beside: Callable[[], None] | None = None
    ) -> tuple[Replayed, Tensor]:
        def both() -> Tensor:
            if beside is not None:
                beside()
            return run(self._run())

        return HostCaptures().whole(both)


class HostGraphBackend(GraphBackend):
    """See `GraphBackend`; without prefix groups, which need the kernels."""

    prefix_groups = False


def with_host_graphs(
    monkeypatch: pytest.MonkeyPatch, kind: type[HostGraphBackend] = HostGraphBackend
) -> Callable[[LoadedWorker], LoadedWorker]:
    """Returns a function that makes a loaded CPU worker run steps in the graph backend's code.

    Each call is timed once, because tests depend on no measured time.
    """
    monkeypatch.setattr(timing, "REPEATS", 1)
    for module in (graphs, mixed, draft_passes, slot_changes):
        monkeypatch.setattr(module, "Staging", CopiedAtOnce)
    monkeypatch.setattr(graphs, "ResultBuffers", CopiedResults)
    monkeypatch.setattr(graphs, "MaskGate", HostGate)
    monkeypatch.setattr(mask_gate, "Branch", HostBranch)
    monkeypatch.setattr(graphs, "DeviceTimer", HostTimer)
    monkeypatch.setattr(graphs, "SharedPrefixes", lambda *_: None)
    monkeypatch.setattr(graphs, "SHARED_BUCKETS", ())
    monkeypatch.setattr(graphs, "measure_piggyback", lambda *_: 0)
    monkeypatch.setattr(graphs, "Captures", HostCaptures)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(GraphBackend, "_variants", _unshared(GraphBackend._variants))

    def adapt(loaded: LoadedWorker) -> LoadedWorker:
        eager = loaded.backend
        assert isinstance(eager, EagerBackend)
        dtype = eager._decoder.weights.embedding.dtype
        with torch.inference_mode():
            draft = eager.draft and getattr(eager.draft, "_head", eager.draft._decoder)
            backend = kind(eager._decoder, loaded.limits, dtype, draft)
        backend.warm_up()
        object.__setattr__(loaded, "backend", backend)
        return loaded

    return adapt


def _unshared(
    variants: Callable[[GraphBackend], Iterator[tuple[Layers, list[Variant]]]],
) -> Callable[[GraphBackend], Iterator[tuple[Layers, list[Variant]]]]:
    return lambda backend: (found for found in variants(backend) if not found[0].shared)
