"""Time cuBLASLt's algorithms for a model's GEMMs, beside torch's.

    PYTHONPATH=services:shared python3 benchmarks/kernels/gemms.py --model llama-3.1-8b \
        [--tokens 96 128 ...] [--search SECONDS] [--output FILE]

For each GEMM of a layer and number of tokens: microseconds by torch, by the best algorithm that
the library's heuristics name, and by the best that a worker tries, with its settings. `--search`
continues from the best algorithms, for SECONDS for each GEMM. It sets one setting after the other
to each value that the library accepts, and keeps faster ones. All algorithms are timed once on a
few weights, then the fastest in a CUDA graph; the weights outgrow the L2 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from ctypes import byref, c_size_t
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pagewire.bench.kernels.shapes import MODELS
from pagewire.bench.kernels.timing import graph_us
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.ops.cublas import cublaslt
from pagewire.worker.ops.cublas.cublaslt import (
    SETTINGS,
    Algorithm,
    Shape,
    algorithms,
    multiply,
    with_settings,
)
from pagewire.worker.ops.cublas.gemm import (
    SCRATCH_BYTES,
    Gemm,
    time_gemm,
    torch_gemm,
    torch_gemm_add,
    worth_trying,
)

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# GEMMs of a layer, and whether they add to the output's old values.
GEMMS = {"qkv": False, "o": True, "gate_up": False, "down": True}
TOKENS = (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)
COPIES, ROTATED_BYTES = 6, 2**29  # minimum number and total size of the weights
FINALISTS = 6  # timed in graphs

TOLERANCE = 6e-3  # of GEMMs in bfloat16
CLEARLY = 0.99  # a better time is at most this multiple of the other
SEARCHED_FROM = 3  # number of algorithms that start a search
# Values to try. cuBLAS 13.1 has tiles up to 634 and clusters up to 51; a query for a number after
# its last tile divides by zero.
TRIED = {
    "tile": range(1, 635),
    "cluster": range(56),
    "stages": range(48),
    "custom": range(32),
    "swizzle": range(4),
    "inner_shape": range(16),
    "split_k": range(1, 17),
}
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: partial sums in float32, as without splitting.
FLOAT32_PARTS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one GEMM; None without a search."""

    gemm: str
    tokens: int
    torch_us: float
    named_us: float
    named: int
    best_us: float
    tried: int
    best: dict[str, int]
    searched_us: float | None
    searched: dict[str, int] | None


class Timer:
    """Times the GEMMs of one shape, with several weights each."""

    def __init__(self, shape: Shape, weights: list[Tensor], scratch: Tensor) -> None:
        self.x = torch.randn(shape.tokens, shape.k, device=DEVICE, dtype=DTYPE)
        self.out = torch.zeros(shape.tokens, shape.features, device=DEVICE, dtype=DTYPE)
        self.by_torch: Gemm = torch_gemm_add if shape.add else torch_gemm
        self._weights = weights
        self._scratch = scratch

    def roughly(self, algorithm: Algorithm) -> float:
        """Microseconds of one GEMM, timed as in a worker."""
        run = partial(multiply, algorithm=algorithm)
        run(self.x, self._weights[0], self.out)  # loads its kernels
        return time_gemm(run, self.x, self._weights, self.out, self._scratch)

    def in_graph(self, run: Gemm) -> float:
        """Microseconds of one GEMM, from a graph with one GEMM for each weight."""
        return graph_us([partial(run, self.x, weight, self.out) for weight in self._weights])

    def ranked(self, known: list[Algorithm]) -> list[Algorithm]:
        """The algorithms by rough timing, fastest first."""
        return sorted(known, key=self.roughly)

    def fastest(self, known: list[Algorithm]) -> tuple[float, Algorithm]:
        """The fastest algorithm and its microseconds."""
        finalists = self.ranked(known)[:FINALISTS]
        times = [self.in_graph(partial(multiply, algorithm=a)) for a in finalists]
        best = min(range(len(times)), key=times.__getitem__)
        return times[best], finalists[best]

    def search(self, begin: list[Algorithm], seconds: float) -> Iterator[Algorithm]:
        """Improves each of `begin` until no change of a single setting makes it faster."""
        for algorithm in begin:
            end = time.perf_counter() + seconds / len(begin)
            best, best_us, last = algorithm, self.roughly(algorithm), None
            while last is not best and time.perf_counter() < end:
                last = best
                for setting, values in TRIED.items():
                    for other in filter(None, (changed(best, setting, value) for value in values)):
                        if time.perf_counter() > end:
                            break
                        try:
                            us = self.roughly(other)
                        except RuntimeError:  # the library may refuse only at launch
                            continue
                        if us < CLEARLY * best_us:
                            best, best_us = other, us
            yield best

    def check(self, algorithm: Algorithm) -> None:
        """SystemExit if its result differs from torch's."""
        results = []
        for run in (partial(multiply, algorithm=algorithm), self.by_torch):
            self.out.zero_()
            run(self.x, self._weights[0], self.out)
            results.append(self.out.float())
        error = float((results[0] - results[1]).norm() / results[1].norm())
        if not error < TOLERANCE:
            raise SystemExit(f"an algorithm that was found is wrong: off by {error:.2g}")


def row_of(name: str, shape: Shape, timer: Timer, seconds: float) -> Row:
    """Times the algorithms of a shape, and those that a search finds within `seconds`."""
    named, tried = algorithms(shape), worth_trying(shape, (), DEVICE)
    named_us, _ = timer.fastest(named)
    best_us, best = timer.fastest(tried)
    searched_us = searched = None
    if seconds:
        begin = timer.ranked(tried)[:SEARCHED_FROM]
        searched_us, searched = timer.fastest(list(timer.search(begin, seconds)))
        timer.check(searched)
    return Row(
        gemm=name,
        tokens=shape.tokens,
        torch_us=timer.in_graph(timer.by_torch),
        named_us=named_us,
        named=len(named),
        best_us=best_us,
        tried=len(tried),
        best=settings_of(best),
        searched_us=searched_us,
        searched=None if searched is None else settings_of(searched),
    )


def changed(algorithm: Algorithm, setting: str, value: int) -> Algorithm | None:
    """A changed copy; None if the library does not accept the setting, or nothing changes."""
    changes = {setting: value}
    if setting == "split_k":
        changes["reduction"] = FLOAT32_PARTS if value > 1 else 0
    other = with_settings(algorithm, **changes)
    same = other is not None and bytes(other.chosen) == bytes(algorithm.chosen)
    return None if same else other


def settings_of(algorithm: Algorithm) -> dict[str, int]:
    """The settings of an algorithm by name."""
    found = {}
    for name, (number, kind) in SETTINGS.items():
        value, written = kind(), c_size_t()
        cublaslt._library().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm.chosen),
            number,
            byref(value),
            c_size_t(ctypes.sizeof(value)),
            byref(written),
        )
        found[name] = value.value
    return found


def figures_of_row(model: str, row: Row) -> Iterator[Figure]:
    """Times of a row, and how many algorithms were tried."""
    name = f"{model}/{row.gemm}/{row.tokens} tokens"
    for what in ("torch_us", "named_us", "best_us", "searched_us"):
        if getattr(row, what) is not None:
            yield Figure(f"{name}/{what}", getattr(row, what), "us")
    yield Figure(f"{name}/named", row.named, "count")
    yield Figure(f"{name}/tried", row.tried, "count")


def line_of(row: Row) -> str:
    """A row for the terminal."""
    line = (
        f"{row.gemm:<8} {row.tokens:5} torch {row.torch_us:8.2f}, "
        f"best of {row.named:3} {row.named_us:8.2f}, "
        f"of {row.tried:3} {row.best_us:8.2f} {list(row.best.values())}"
    )
    if row.searched_us is None or row.searched is None:
        return line
    return f"{line}, searched {row.searched_us:8.2f} {list(row.searched.values())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--search", type=float, default=0.0, help="seconds a GEMM")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures: list[Figure] = []
    print("of those that heuristics name, and of all that a worker tries; microseconds")
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=DEVICE)
    matrices = MODELS[options.model].matrices
    for name in GEMMS:
        features, k = matrices[name]
        copies = max(COPIES, ROTATED_BYTES // (features * k * DTYPE.itemsize))
        weights = [
            torch.randn(features, k, device=DEVICE, dtype=DTYPE) * k**-0.5 for _ in range(copies)
        ]
        for tokens in options.tokens:
            shape = Shape(tokens, features, k, DTYPE, add=GEMMS[name])
            timer = Timer(shape, weights, scratch)
            row = row_of(name, shape, timer, options.search)
            figures += figures_of_row(options.model, row)
            print(line_of(row), flush=True)
    if options.output is not None:
        write_rows(options.output, figures, command_line())


if __name__ == "__main__":
    main()
