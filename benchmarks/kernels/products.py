"""Time all algorithms that cuBLASLt's heuristics name for a model's products, beside torch's.

    PYTHONPATH=services:shared python3 benchmarks/kernels/products.py --model llama-3.1-8b \
        [--tokens 96 128 ...] [--most 256] [--json FILE]

For each product of a layer and number of tokens: microseconds by torch, by the best of those that a
worker would try by itself (`cublaslt.MOST_RESULTS` a workspace), and by the best of `--most`, with
the place that the heuristics give it. All are timed once on a few weights; the fastest then in a
CUDA graph over weights that outgrow the L2 cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pagewire.worker.kernel_bench.shapes import MODELS, Shapes
from pagewire.worker.kernel_bench.timing import graph_us
from pagewire.worker.ops.triton.cublaslt import MOST_RESULTS, Shape, algorithms, multiply

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TOKENS = (64, 96, 128, 160, 192, 224, 256, 384, 512)
COPIES, ROTATED_BYTES = 6, 2**29  # weights of at least so many layers, and so large together
FINALISTS = 6  # timed in graphs

Run = Callable[[Tensor], object]  # of a weight


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one product; `place` counts from 0 in the order of the heuristics."""

    product: str
    tokens: int
    torch_us: float
    usual_us: float
    usual_algorithms: int
    best_us: float
    algorithms: int
    place: int


def products(shapes: Shapes) -> dict[str, tuple[int, int, bool]]:
    """By name: features, k, and whether the product is added to what the output holds."""
    width = shapes.query_heads * shapes.head_dim
    return {
        "qkv": (width + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden, False),
        "o": (shapes.hidden, width, True),
        "gate_up": (2 * shapes.intermediate, shapes.hidden, False),
        "down": (shapes.hidden, shapes.intermediate, True),
    }


def time_product(name: str, shape: Shape, weights: list[Tensor], most: int) -> Row:
    """All algorithms of a shape."""
    x = torch.randn(shape.tokens, shape.k, device=DEVICE, dtype=DTYPE)
    out = torch.zeros(shape.tokens, shape.features, device=DEVICE, dtype=DTYPE)
    usual = {bytes(a.chosen) for a in algorithms(shape)}
    known = algorithms(shape, most=most)
    runs: list[Run] = [lambda w, a=a: multiply(x, w, out, a) for a in known]
    first = [roughly(run, weights) for run in runs]
    order = sorted(range(len(known)), key=first.__getitem__)
    own = [i for i in order if bytes(known[i].chosen) in usual]
    exact = {i: in_graph(runs[i], weights) for i in {*order[:FINALISTS], *own[:FINALISTS]}}
    best = min(exact, key=exact.__getitem__)

    def by_torch(weight: Tensor) -> Tensor:
        return out.addmm_(x, weight.t()) if shape.add else torch.mm(x, weight.t(), out=out)

    return Row(
        product=name,
        tokens=shape.tokens,
        torch_us=in_graph(by_torch, weights),
        usual_us=min(exact[i] for i in own[:FINALISTS]),
        usual_algorithms=len(usual),
        best_us=exact[best],
        algorithms=len(known),
        place=best,
    )


def roughly(run: Run, weights: list[Tensor]) -> float:
    """Microseconds of the second round of a few, queued one by one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(weights[0])
    begin.record()
    for weight in weights:
        run(weight)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / len(weights)


def in_graph(run: Run, weights: list[Tensor]) -> float:
    """Microseconds of one, from a graph of one with each weight."""
    return graph_us([partial(run, weight) for weight in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--most", type=int, default=256)
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
            row = time_product(name, shape, weights, options.most)
            rows.append(row)
            print(
                f"{name:<8} {tokens:5} torch {row.torch_us:8.2f}, "
                f"best of {row.usual_algorithms:3} {row.usual_us:8.2f}, "
                f"of {row.algorithms:3} {row.best_us:8.2f} (place {row.place})",
                flush=True,
            )
    if options.json is not None:
        result = {"model": options.model, "gpu": torch.cuda.get_device_name(), "most": options.most}
        result["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
