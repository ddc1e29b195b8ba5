"""Time GEMMs of few tokens on one Hopper GPU: by the usual kernels, and in the reference order.

    PYTHONPATH=services:shared python3 benchmarks/kernels/invariant_gemms.py --model qwen3-0.6b \
        [--tokens 1 2 4] [--output FILE]

For each GEMM of a layer, the head, and number of tokens: microseconds by the kernels that a worker
uses without `--batch-invariant` and with it, and by the fastest of all tried tiles. Each is timed
in a CUDA graph over weights that outgrow the L2 cache; a kernel may begin before the previous one
has ended. Tiles whose bits differ from the reference order are errors, and are named. The last
lines add up the layers and the head of a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from pagewire.bench.kernels.shapes import MODELS
from pagewire.bench.kernels.timing import graph_us
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton import linear as usual
from pagewire.worker.ops.triton.invariant import linear as ordered
from pagewire.worker.ops.triton.invariant.linear_config import OrderedConfig, any_tokens
from pagewire.worker.ops.triton.streamed.config import StreamConfig

EPS = 1e-6
ROTATED_BYTES = 2**30
LAYERS = {"qwen3-0.6b": 28, "llama-3.1-8b": 32}
OPERATIONS = {
    "qkv": "norm_linear",
    "o": "linear_add",
    "gate_up": "norm_gate_up_silu_mul",
    "down": "linear_add",
    "lm_head": "norm_linear",
}
# Errors of tiles that do not fit the device, here or in the compiler.
UNFIT = (triton.runtime.errors.OutOfResources, RuntimeError)


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM with random inputs: enough weights to outgrow the cache, one of each other input."""

    operation: str
    x: Tensor  # [tokens, k]
    weights: list[Tensor]  # [rows, k]
    residual: Tensor  # [tokens, rows]

    @classmethod
    def drawn(cls, name: str, tokens: int, rows: int, k: int) -> Gemm:
        copies = max(3, -(-ROTATED_BYTES // (2 * rows * k)))
        weights = [randn(rows, k, scale=k**-0.5) for _ in range(copies)]
        return cls(OPERATIONS[name], randn(tokens, k), weights, randn(tokens, rows))

    def calls(self, module: object, **options: object) -> list[Callable[[], Tensor]]:
        function = getattr(module, self.operation)
        if self.operation == "linear_add":
            return [partial(function, self.x, w, self.residual, **options) for w in self.weights]
        return [partial(function, self.x, None, EPS, w, **options) for w in self.weights]

    def result(self, config: OrderedConfig | StreamConfig) -> Tensor:
        """The result of the first weight; leaves the residual unchanged."""
        kept = self.residual.clone()
        out = self.calls(ordered, config=config)[0]().clone()
        self.residual.copy_(kept)
        return out


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


def candidates(gemm: Gemm, k: int) -> Iterator[StreamConfig]:
    """Tiles that fit the device's shared memory, or nearly so."""
    tokens = max(8, next_power_of_2(len(gemm.x)))
    least = 16 if gemm.operation == "norm_gate_up_silu_mul" else 8
    for rows in (8, 16, 32, 64):
        for tiles in (2, 4):
            for size in (50_000, 100_000, 150_000, 200_000):
                stages = min(size // (128 * tiles * (rows + tokens)), k // (64 * tiles))
                if rows >= least and stages >= 2:
                    yield StreamConfig(rows, tokens, stages, tiles)


def search(gemm: Gemm, k: int) -> tuple[StreamConfig | None, float, list[StreamConfig]]:
    """The fastest tiles, their microseconds, and the tiles whose bits differ from the order's."""
    expected = gemm.result(any_tokens(len(gemm.x), k, 2))
    best, fastest, wrong = None, float("inf"), []
    for config in dict.fromkeys(candidates(gemm, k)):
        try:
            if not torch.equal(gemm.result(config), expected):
                wrong.append(config)
                continue
            us = graph_us(gemm.calls(ordered, config=config))
        except UNFIT:
            continue
        if us < fastest:
            best, fastest = config, us
    return best, fastest, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures, wrong = [], []
    for tokens in arguments.tokens:
        totals = {"without": 0.0, "with": 0.0, "fastest": 0.0}
        for name, (rows, k) in MODELS[arguments.model].matrices.items():
            gemm = Gemm.drawn(name, tokens, rows, k)
            config, fastest, different = search(gemm, k)
            wrong += different
            times = {
                "without": graph_us(gemm.calls(usual)),
                "with": graph_us(gemm.calls(ordered)),
                "fastest": fastest,
            }
            line = ", ".join(f"{kind} {us:.2f} us" for kind, us in times.items())
            print(f"{name}, tokens: {tokens}: {line}: {config}", flush=True)
            for kind, us in times.items():
                totals[kind] += us * (1 if name == "lm_head" else LAYERS[arguments.model])
                figures.append(Figure(f"{arguments.model}/{name}/{tokens}/{kind}", us, "us"))
            del gemm
            torch.cuda.empty_cache()
        line = ", ".join(f"{kind} {us:.0f} us" for kind, us in totals.items())
        print(f"all layers and the head, tokens: {tokens}: {line}", flush=True)
        figures += [
            Figure(f"{arguments.model}/all/{tokens}/{kind}", us, "us")
            for kind, us in totals.items()
        ]
    if arguments.output is not None:
        write_rows(arguments.output, figures, command_line())
    for config in wrong:
        print(f"other bits than the reference order: {config}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
