"""A worker's start and steps as on an H100, on any machine: nothing is computed.

Tensors are on torch's meta device: they have shapes, types and alignment, but no values. Kernels
are looked up as in a launch, but not launched. Operations that a GPU would refuse or wait for are
recorded: copies from the host or to it during the capture of a graph, and operations with tensors
on both devices. The process must not have TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from pagewire.config import WorkerConfig
from pagewire.packing import Int32Array
from pagewire.worker.ops import device as device_module
from pagewire.worker.startup.compile_pool import CompileJob
from pagewire.worker.startup.compile_server import TargetDriver

META = torch.device("meta")
PROCESSORS = 132
MEMORY = 40 << 30  # bytes for the KV cache


class _Driver(TargetDriver):
    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    """Makes the meta device look like an H100; call it before kernels are imported."""
    device_module.multiprocessors = lambda device: PROCESSORS
    device_module.dependent_launch = lambda device: True
    device_module.is_hopper = lambda device: True
    driver.set_active(_Driver(GPUTarget("cuda", 90, 32)))


@dataclass
class PretendedStart:
    """Kernels that the start and the steps of a worker would have launched."""

    ahead: list[CompileJob] = field(default_factory=list)  # compiled before weights are loaded
    launched: list[CompileJob] = field(default_factory=list)  # looked up after that
    refused: list[str] = field(default_factory=list)  # what a GPU would refuse or wait for
    profiled: list[CompileJob] = field(default_factory=list)  # of `launched`, to measure memory

    @property
    def late(self) -> list[CompileJob]:
        """The variants that the worker would compile itself."""
        known = {_key(job) for job in self.ahead}
        return [job for job in self.launched if _key(job) not in known]


def _key(job: CompileJob) -> tuple[str, str, str]:
    return job.module, job.kernel, job.specialization


class _Watch(TorchDispatchMode):
    """Notes the operations that a GPU would refuse or wait for."""

    def __init__(self, start: PretendedStart) -> None:
        super().__init__()
        self._start = start
        self.capturing = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        devices = {tensor.device.type for tensor in _tensors((args, list(kwargs.values())))}
        copies = "copy" in str(function)
        if "cpu" in devices and (self.capturing or ("meta" in devices and not copies)):
            when = "while a graph is captured" if self.capturing else "with tensors of both"
            self._start.refused.append(f"{function} of the host's tensors {when}")
        return function(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


class _Event:
    """Stands in for an event of CUDA."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: _Event) -> float:
        return 1.0


class _Staging:
    """Stands in for `Staging`, which needs pinned memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        assert target.device == META
        assert target.is_contiguous()
        assert fill.dtype == np.int32
        assert fill.size == target.numel() <= self._size


class _Results:
    """Stands in for `ResultBuffers`, which needs pinned memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def copy(self, results: Tensor) -> Callable[[], Int32Array]:
        assert results.device == META
        assert results.is_contiguous()
        assert results.numel() <= self._size
        return lambda: np.zeros(results.shape, np.int32)


class _Graph:
    def replay(self) -> None:
        pass


class _Record:
    """Stands in for `KernelRecord`: kernels were never compiled, GEMMs never measured."""

    def __init__(self, _: WorkerConfig) -> None:
        pass

    def exists(self) -> bool:
        return False

    def write(self) -> None:
        pass

    def gemms(self) -> None:
        pass

    def keep_gemms(self, _: dict[str, Any]) -> None:
        pass


class _Pool:
    """Stands in for `CompilePool`."""

    def __init__(self, jobs: list[CompileJob]) -> None:
        self.submit = jobs.append

    def finish(self) -> list[Any]:
        return []


def _uploaded(_: torch.device, *arrays: Int32Array) -> tuple[Tensor, ...]:
    assert all(array.dtype == np.int32 and array.ndim == 1 for array in arrays)
    return tuple(torch.empty(len(array), dtype=torch.int32, device=META) for array in arrays)


def _compared(weights: list[Tensor], tokens: list[int], add: bool, reference: Any = None) -> int:
    """Stands in for `choose_algorithms`, which runs the reference for all numbers of tokens."""
    features, k = weights[0].shape
    if reference is not None:
        for count in tokens:
            x, out = (weights[0].new_empty((count, width)) for width in (k, features))
            reference(x, weights[0], out)
    return 0


def _to_host(_: Any, results: Tensor) -> Tensor:
    assert results.device == META
    return torch.zeros(results.shape, dtype=results.dtype)


@contextmanager
def pretended(start: PretendedStart) -> Iterator[None]:
    """Inside, a worker can be loaded with the meta device, warmed up and given steps."""
    from pagewire.worker.model.decoder import Decoder
    from pagewire.worker.model.eagle import loading as eagle_loading
    from pagewire.worker.model.weights import empty_weights
    from pagewire.worker.runtime import device_drafts, device_logprobs, device_slots, eager
    from pagewire.worker.runtime.graphs import (
        backend,
        draft_passes,
        mask_gate,
        mixed,
        shared_prefixes,
        slot_changes,
    )
    from pagewire.worker.startup import draft_model, invariance, loading, tuning
    from pagewire.worker.startup.pooled_model import PoolingHead
    from pagewire.worker.startup.triton_hooks import collecting_kernels
    from support.models.host_graphs import HostBranch

    watch = _Watch(start)

    class Captured:
        """Stands in for `Captures`."""

        def __enter__(self) -> Captured:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def whole(self, run: Callable[[], Any]) -> tuple[_Graph, Any]:
            watch.capturing = True
            try:
                return _Graph(), run()
            finally:
                watch.capturing = False

        def start(self, run: Callable[[Callable[[], None]], Any]) -> Start:
            return Start(self.whole(partial(run, lambda: None))[1])

    class Start:
        """Stands in for `CapturedStart`."""

        def __init__(self, result: Any) -> None:
            self._result = result

        def continued(
            self, run: Callable[[Any], Tensor], beside: Callable[[], None] | None = None
        ) -> tuple[_Graph, Tensor]:
            def both() -> Tensor:
                if beside is not None:
                    beside()
                return run(self._result)

            return Captured().whole(both)

    def free_bytes(_: torch.device, __: float, profile: Callable[[], None]) -> int:
        before = len(start.launched)
        profile()
        start.profiled += start.launched[before:]
        return MEMORY

    def dummy(model: Any, dtype: torch.dtype, device: torch.device, _: int) -> Any:
        return empty_weights(model, dtype, device)

    with ExitStack() as stack:

        def decoder(*arguments: Any) -> Decoder:
            # Made once the weights are loaded: from here on a worker launches kernels.
            stack.enter_context(collecting_kernels(start.launched.append))
            return Decoder(*arguments)

        compared = partial(invariance.check_invariance, same=lambda *_: True)
        replaced: list[tuple[Any, str, Any]] = [
            (torch.cuda, "Event", _Event),
            (torch.cuda, "default_stream", lambda: None),
            (torch.cuda, "synchronize", lambda _: None),
            (torch.cuda, "empty_cache", lambda: None),
            (loading, "choose_device", lambda _: META),
            (loading, "KernelRecord", _Record),
            (loading, "CompilePool", partial(_Pool, start.ahead)),
            (loading, "MAX_DRAFTS", {"meta": loading.MAX_DRAFTS["cuda"]}),
            (loading, "_describe", str),
            (loading, "dummy_weights", dummy),
            (draft_model, "dummy_weights", dummy),
            (eagle_loading, "_randomize", lambda *_: None),
            (loading, "measure_free_bytes", free_bytes),
            (PoolingHead, "randomize", lambda *_: None),
            (loading, "Decoder", decoder),
            (tuning, "choose_algorithms", _compared),
            (tuning, "choices", lambda _: {}),
            (invariance, "check_invariance", compared),
            (tuning, "_once", lambda run: 1.0 if run() is not None else 0.0),
            (eager.EagerBackend, "_to_host", _to_host),
            (backend, "Captures", Captured),
            (backend, "ResultBuffers", _Results),
            (mask_gate.MaskGate, "_pin", lambda *_: None),
            (mask_gate, "Branch", HostBranch),
        ]
        uploading = (device_drafts, device_logprobs, device_slots, eager)
        replaced += [(module, "upload", _uploaded) for module in uploading]
        staging = (backend, draft_passes, mixed, shared_prefixes, slot_changes)
        replaced += [(module, "Staging", _Staging) for module in staging]
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(watch)
        yield
