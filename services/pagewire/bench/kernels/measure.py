"""Times a case: the kernel, its twin in eager torch, and the twin as torch.compile makes it."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from pagewire.bench.kernels.cases import Case, CaseMaker, at_least
from pagewire.bench.kernels.shapes import MODELS, Sizes
from pagewire.bench.kernels.timing import Ceilings, graph_us, measure_ceilings, stream_us
from pagewire.worker.ops import load_ops

MIN_CALLS = 8


@dataclass(frozen=True, slots=True)
class Result:
    """What of a case could be measured; `error` says why the rest could not."""

    name: str
    unit: str | None = None
    work: int | None = None  # bytes or floating-point operations of a call
    microseconds: float | None = None
    rate: float | None = None  # TB/s or TFLOP/s
    of_ceiling: float | None = None
    eager_microseconds: float | None = None
    compiled_microseconds: float | None = None
    error: str | None = None

    def speedup_over(self, microseconds: float | None) -> float | None:
        """How many times as fast as a twin that took so long."""
        if microseconds is None or self.microseconds is None:
            return None
        return microseconds / self.microseconds


def bench_kernels(
    model: str, compiled: bool, ceilings: Ceilings, device: torch.device
) -> Iterator[Result]:
    """Time all cases of a model of MODELS one after another, on a GPU."""
    torch.manual_seed(0)
    for name, make in CaseMaker(MODELS[model], Sizes(), device).all():
        yield measure(name, make, compiled, ceilings)
        gc.collect()
        torch.cuda.empty_cache()


def measure(name: str, make: Callable[[], Case], compiled: bool, ceilings: Ceilings) -> Result:
    """Time a case as far as it goes: an error ends it and is part of the result."""
    result = Result(name)
    try:
        case = make()
        result = replace(result, unit=case.unit, work=case.work)
        us = graph_us(at_least(case.calls(load_ops("triton")), MIN_CALLS))
        rate = case.work / us / 1e6
        of_ceiling = rate / ceilings.of(case.unit)
        result = replace(result, microseconds=us, rate=rate, of_ceiling=of_ceiling)
        eager = case.calls(load_ops("torch"))
        if case.twin_on_host:
            return replace(result, eager_microseconds=stream_us(eager[:2]))
        result = replace(result, eager_microseconds=graph_us(at_least(eager, MIN_CALLS)))
        if compiled:
            calls = at_least(case.calls(compiled_twins(case.op)), MIN_CALLS)
            result = replace(result, compiled_microseconds=graph_us(calls))
    except Exception as error:
        return replace(result, error=_one_line(error))
    return result


def compiled_twins(op: str) -> Any:
    """The twins in plain torch, `op` of them compiled for the shapes that it meets."""
    twins = load_ops("torch")
    return SimpleNamespace(**{op: torch.compile(getattr(twins, op), dynamic=False)})


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def gpu_ceilings() -> tuple[str, Ceilings]:
    """The name of the current GPU and its measured rates."""
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    return torch.cuda.get_device_name(), ceilings
