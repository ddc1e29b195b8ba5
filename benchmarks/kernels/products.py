"""Time all algorithms that cuBLASLt's heuristics name for a model's products, beside torch's.

    PYTHONPATH=services:shared python3 benchmarks/kernels/products.py --model llama-3.1-8b \
        [--tokens 96 128 ...] [--most 256] [--search SECONDS] [--json FILE]

For each product of a layer and number of tokens: microseconds by torch, by the best of those that a
worker would try by itself (`cublaslt.MOST_RESULTS` a workspace), and by the best of `--most`, with
its settings. `--search` goes on from the best ones, for so long a product: it changes one setting
of theirs after the other to each value that the library takes, and keeps what is faster. All are
timed once on a few weights, the fastest then in a CUDA graph; the weights outgrow the L2 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int32, c_size_t, c_uint16, c_uint32
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from pagewire.worker.kernel_bench.shapes import MODELS, Shapes
from pagewire.worker.kernel_bench.timing import graph_us
from pagewire.worker.ops.triton import cublaslt
from pagewire.worker.ops.triton.cublaslt import (
    MOST_RESULTS,
    Algorithm,
    Shape,
    algorithms,
    multiply,
)

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TOKENS = (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)
COPIES, ROTATED_BYTES = 6, 2**29  # weights of at least so many layers, and so large together
FINALISTS = 6  # timed in graphs

TOLERANCE = 6e-3  # of products of bfloat16
CLEARLY = 0.99  # a time that is better is so many times the other
SEARCHED_FROM = 3  # of the algorithms that the heuristics name
# cublasLtMatmulAlgoConfigAttributes_t: number and type of each setting.
SETTINGS = {
    "id": (0, c_int32),
    "tile": (1, c_uint32),
    "split_k": (2, c_int32),
    "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32),
    "custom": (5, c_uint32),
    "stages": (6, c_uint32),
    "inner_shape": (7, c_uint16),
    "cluster": (8, c_uint16),
}
# What is tried of each; cuBLAS 13 has tiles up to 645, and clusters up to 51.
TRIED = {
    "tile": range(1, 660),
    "cluster": range(56),
    "stages": range(48),
    "custom": range(32),
    "swizzle": range(4),
    "inner_shape": range(16),
    "split_k": range(1, 17),
}
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: partial sums in float32, as without splitting.
FLOAT32_PARTS = 2

Run = Callable[[Tensor], object]  # of a weight


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one product; None where nothing was searched."""

    product: str
    tokens: int
    torch_us: float
    usual_us: float
    usual_algorithms: int
    best_us: float
    algorithms: int
    best: dict[str, int]
    searched_us: float | None
    searched: dict[str, int] | None


def products(shapes: Shapes) -> dict[str, tuple[int, int, bool]]:
    """By name: features, k, and whether the product is added to what the output holds."""
    width = shapes.query_heads * shapes.head_dim
    return {
        "qkv": (width + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden, False),
        "o": (shapes.hidden, width, True),
        "gate_up": (2 * shapes.intermediate, shapes.hidden, False),
        "down": (shapes.hidden, shapes.intermediate, True),
    }


def time_product(name: str, shape: Shape, weights: list[Tensor], most: int, seconds: float) -> Row:
    """All algorithms of a shape, and those that a search finds in some time."""
    x = torch.randn(shape.tokens, shape.k, device=DEVICE, dtype=DTYPE)
    out = torch.zeros(shape.tokens, shape.features, device=DEVICE, dtype=DTYPE)

    def by(algorithm: Algorithm) -> Run:
        return lambda weight: multiply(x, weight, out, algorithm)

    def by_torch(weight: Tensor) -> Tensor:
        return out.addmm_(x, weight.t()) if shape.add else torch.mm(x, weight.t(), out=out)

    usual, known = algorithms(shape), algorithms(shape, most=most)
    usual_us, _ = fastest(usual, by, weights)
    best_us, best = fastest(known, by, weights)
    searched_us = searched = None
    if seconds:
        found = list(search(ranked(known, by, weights)[:SEARCHED_FROM], by, weights, seconds))
        searched_us, searched = fastest(found, by, weights)
        check(by(searched), by_torch, weights[0], out)
    return Row(
        product=name,
        tokens=shape.tokens,
        torch_us=in_graph(by_torch, weights),
        usual_us=usual_us,
        usual_algorithms=len(usual),
        best_us=best_us,
        algorithms=len(known),
        best=settings_of(best),
        searched_us=searched_us,
        searched=None if searched is None else settings_of(searched),
    )


def ranked(
    known: list[Algorithm], by: Callable[[Algorithm], Run], weights: list[Tensor]
) -> list[Algorithm]:
    """The fastest first, as far as a rough look tells."""
    return sorted(known, key=lambda algorithm: roughly(by(algorithm), weights))


def fastest(
    known: list[Algorithm], by: Callable[[Algorithm], Run], weights: list[Tensor]
) -> tuple[float, Algorithm]:
    """The fastest algorithm and its microseconds."""
    finalists = ranked(known, by, weights)[:FINALISTS]
    times = [in_graph(by(algorithm), weights) for algorithm in finalists]
    best = min(range(len(times)), key=times.__getitem__)
    return times[best], finalists[best]


def search(
    begin: list[Algorithm], by: Callable[[Algorithm], Run], weights: list[Tensor], seconds: float
) -> Iterator[Algorithm]:
    """What is left of each of `begin` when no single setting of it can be bettered any more."""
    for algorithm in begin:
        end = time.perf_counter() + seconds / len(begin)
        best, best_us, last = algorithm, roughly(by(algorithm), weights), None
        while last is not best and time.perf_counter() < end:
            last = best
            for setting, values in TRIED.items():
                for other in filter(None, (changed(best, setting, value) for value in values)):
                    if time.perf_counter() > end:
                        break
                    try:
                        us = roughly(by(other), weights)
                    except RuntimeError:  # the library refuses it only now
                        continue
                    if us < CLEARLY * best_us:
                        best, best_us = other, us
        yield best


def check(run: Run, by_torch: Run, weight: Tensor, out: Tensor) -> None:
    """SystemExit if the two do not compute the same."""
    results = []
    for product in (run, by_torch):
        out.zero_()
        product(weight)
        results.append(out.float())
    error = float((results[0] - results[1]).norm() / results[1].norm())
    if not error < TOLERANCE:
        raise SystemExit(f"an algorithm that was found computes something else: off by {error:.2g}")


def changed(algorithm: Algorithm, setting: str, value: int) -> Algorithm | None:
    """The same with another setting; None if the library does not take it."""
    chosen = cublaslt._Algorithm.from_buffer_copy(algorithm.chosen)
    changes = {setting: value}
    if setting == "split_k":
        changes["reduction"] = FLOAT32_PARTS if value > 1 else 0
    for name, wanted in changes.items():
        number, kind = SETTINGS[name]
        held = kind(wanted)
        if library().cublasLtMatmulAlgoConfigSetAttribute(
            byref(chosen), number, byref(held), c_size_t(ctypes.sizeof(held))
        ):
            return None
    if bytes(chosen) == bytes(algorithm.chosen):
        return None
    shape = (algorithm.description, algorithm.weight, algorithm.x, algorithm.out)
    return replace(algorithm, chosen=chosen) if cublaslt._fits(*shape, chosen) else None


def settings_of(algorithm: Algorithm) -> dict[str, int]:
    """Its settings by name."""
    found = {}
    for name, (number, kind) in SETTINGS.items():
        value, written = kind(), c_size_t()
        library().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm.chosen),
            number,
            byref(value),
            c_size_t(ctypes.sizeof(value)),
            byref(written),
        )
        found[name] = value.value
    return found


def library() -> ctypes.CDLL:
    """What the worker's own calls go to."""
    return cublaslt._library()


def roughly(run: Run, weights: list[Tensor]) -> float:
    """Microseconds of one, queued one by one while the device is kept busy with something else."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(weights[0])  # loads what it launches
    filler().zero_()
    begin.record()
    for weight in weights:
        run(weight)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / len(weights)


@cache
def filler() -> Tensor:
    """Writing it takes as long as queueing some products, and empties the L2 cache of weights."""
    return torch.empty(ROTATED_BYTES, dtype=torch.uint8, device=DEVICE)


def in_graph(run: Run, weights: list[Tensor]) -> float:
    """Microseconds of one, from a graph of one with each weight."""
    return graph_us([partial(run, weight) for weight in weights])


def line_of(row: Row) -> str:
    """A row for the terminal."""
    line = (
        f"{row.product:<8} {row.tokens:5} torch {row.torch_us:8.2f}, "
        f"best of {row.usual_algorithms:3} {row.usual_us:8.2f}, "
        f"of {row.algorithms:3} {row.best_us:8.2f} {list(row.best.values())}"
    )
    if row.searched_us is None or row.searched is None:
        return line
    return f"{line}, searched {row.searched_us:8.2f} {list(row.searched.values())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--search", type=float, default=0.0, help="seconds a product")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"of {MOST_RESULTS} and {options.most} asked for; microseconds")
    for name, (features, k, add) in products(MODELS[options.model]).items():
        copies = max(COPIES, ROTATED_BYTES // (features * k * DTYPE.itemsize))
        weights = [
            torch.randn(features, k, device=DEVICE, dtype=DTYPE) * k**-0.5 for _ in range(copies)
        ]
        for tokens in options.tokens:
            shape = Shape(tokens, features, k, DTYPE, add)
            row = time_product(name, shape, weights, options.most, options.search)
            rows.append(row)
            print(line_of(row), flush=True)
    if options.json is not None:
        result = {"model": options.model, "gpu": torch.cuda.get_device_name(), "most": options.most}
        result["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
