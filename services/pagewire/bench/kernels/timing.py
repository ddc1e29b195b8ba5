"""The time of calls on a GPU, and the rates that the GPU itself reaches."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of a GPU: an elementwise copy and a bf16 GEMM."""

    copy_tb_per_s: float
    matmul_tflop_per_s: float

    def of(self, unit: str) -> float:
        """Return the ceiling in `unit`, "TB/s" or "TFLOP/s"."""
        return self.copy_tb_per_s if unit == "TB/s" else self.matmul_tflop_per_s


def graph_us(calls: Sequence[Call], replays: int = 7, warm_s: float = 0.02) -> float:
    """Return the microseconds of one call: the median over replays of a CUDA graph of all calls.

    The graph is first replayed for `warm_s` seconds. Whole steps need more: after large
    allocations the device is slower for a while.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    began = time.perf_counter()
    while time.perf_counter() < began + warm_s:
        graph.replay()
        torch.cuda.synchronize()
    return statistics.median(_events_us(graph.replay) for _ in range(replays)) / len(calls)


def stream_us(calls: Sequence[Call], repeats: int = 3) -> float:
    """Return the microseconds of one call without a graph, for calls that read on the host."""
    calls[0]()
    torch.cuda.synchronize()

    def run_all() -> None:
        for call in calls:
            call()

    return statistics.median(_events_us(run_all) for _ in range(repeats)) / len(calls)


def measure_ceilings(elements: int = 2**30, width: int = 8192) -> Ceilings:
    """Time a copy of `elements` bf16 values and a GEMM of square bf16 matrices of `width`."""
    source = torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_us = graph_us([lambda: torch.mul(source, 1.0, out=target)] * 2)
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    result = torch.empty_like(a)
    matmul_us = graph_us([lambda: torch.mm(a, b, out=result)] * 4)
    return Ceilings(2 * source.nbytes / copy_us / 1e6, 2 * width**3 / matmul_us / 1e6)


def _events_us(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000
