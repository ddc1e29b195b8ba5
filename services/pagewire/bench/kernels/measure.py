"""Times a case: the kernel, the reference in eager torch, and the reference under torch.compile."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from pagewire.bench.kernels.cases import Case, CaseMaker, at_least
from pagewire.bench.kernels.expert_cases import ExpertCaseMaker
from pagewire.bench.kernels.fp8_kv import Fp8KvCases
from pagewire.bench.kernels.latent_cases import LatentCaseMaker
from pagewire.bench.kernels.quantized import QuantizedCases
from pagewire.bench.kernels.quantized_expert_cases import QuantizedExpertCases
from pagewire.bench.kernels.shapes import EXPERT_MODELS, LATENT_MODELS, MODELS, Sizes
from pagewire.bench.kernels.timing import Ceilings, graph_us, measure_ceilings, stream_us
from pagewire.worker.ops import Name, load_ops

MIN_CALLS = 8


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a case. A failed measurement is None, and `error` has the reason."""

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
        """Return how many times as fast the kernel is as a reference that took `microseconds`."""
        if microseconds is None or self.microseconds is None:
            return None
        return microseconds / self.microseconds


def bench_kernels(
    model: str, compiled: bool, ceilings: Ceilings, device: torch.device, ops: Name = "triton"
) -> Iterator[Result]:
    """Time all cases of a model by `ops` on a GPU, one after another.

    `model` is one of MODELS. One of EXPERT_MODELS or LATENT_MODELS selects the operations of its
    experts or of its latent attention.
    """
    torch.manual_seed(0)
    makers: list[
        CaseMaker
        | Fp8KvCases
        | QuantizedCases
        | ExpertCaseMaker
        | QuantizedExpertCases
        | LatentCaseMaker
    ]
    if model in EXPERT_MODELS:
        plain = ExpertCaseMaker(EXPERT_MODELS[model], Sizes(), device)
        makers = [plain, QuantizedExpertCases(plain)]
    elif model in LATENT_MODELS:
        makers = [LatentCaseMaker(LATENT_MODELS[model], Sizes(), device)]
    else:
        makers = [
            CaseMaker(MODELS[model], Sizes(), device, ops=ops),
            Fp8KvCases(MODELS[model], Sizes(), device, ops=ops),
        ]
        if ops == "triton":  # the mode --batch-invariant has no quantized weights
            makers.append(QuantizedCases(MODELS[model], Sizes(), device))
    for name, make in (case for maker in makers for case in maker.all()):
        yield measure(name, make, compiled, ceilings, ops)
        gc.collect()
        torch.cuda.empty_cache()


def measure(
    name: str,
    make: Callable[[], Case],
    compiled: bool,
    ceilings: Ceilings,
    ops: Name = "triton",
) -> Result:
    """Time a case. An error ends the measurement and becomes part of the result."""
    result = Result(name)
    try:
        case = make()
        result = replace(result, unit=case.unit, work=case.work)
        us = graph_us(at_least(case.calls(load_ops(ops)), MIN_CALLS))
        rate = case.work / us / 1e6
        of_ceiling = rate / ceilings.of(case.unit)
        result = replace(result, microseconds=us, rate=rate, of_ceiling=of_ceiling)
        eager = case.calls(load_ops("torch"))
        if case.reference_on_host:
            return replace(result, eager_microseconds=stream_us(eager[:2]))
        result = replace(result, eager_microseconds=graph_us(at_least(eager, MIN_CALLS)))
        if compiled:
            calls = at_least(case.calls(compiled_reference(case.op)), MIN_CALLS)
            result = replace(result, compiled_microseconds=graph_us(calls))
    except Exception as error:
        return replace(result, error=_one_line(error))
    return result


def compiled_reference(op: str) -> Any:
    """Return an object whose operation `op` is the reference, compiled for each shape."""
    reference = load_ops("torch")
    return SimpleNamespace(**{op: torch.compile(getattr(reference, op), dynamic=False)})


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def gpu_ceilings() -> tuple[str, Ceilings]:
    """Return the name of the current GPU and its measured rates."""
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    return torch.cuda.get_device_name(), ceilings
