"""Time the tiles of products with quantized weights, beside cuBLAS in bfloat16.

    PYTHONPATH=services:shared python3 benchmarks/kernels/quantized.py --model llama-3.1-8b \
        [--tokens 1 8 32 ...] [--formats FP8 "4 bits" ...] [--output FILE]

For each matrix of a layer, format and number of tokens: microseconds of the worker's kernel, of the
plain kernel with the fastest of the tried tiles, and of a plain product. Calls run in a CUDA graph,
one with each of several weights, which outgrow the L2 cache. Tiles that do not fit the
multiprocessor are left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from pagewire.bench.kernels.quantized import FORMATS
from pagewire.bench.kernels.shapes import MODELS
from pagewire.bench.kernels.timing import graph_us
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.ops.contract.quantized import ScaledWeight, tensors_of
from pagewire.worker.ops.triton.quantized import linear
from pagewire.worker.ops.triton.quantized.grouped import grouped_linear
from pagewire.worker.ops.triton.quantized.scaled import scaled_linear
from pagewire.worker.ops.triton.quantized.tiles import Tiles
from pagewire.worker.ops.triton.rowwise.quantize import quantize

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
ROTATED_BYTES = 2**29


def tried(tokens: int) -> Iterator[Tiles]:
    """The tiles that may suit this many tokens."""
    widths = [width for width in (16, 32, 64, 128, 256) if width < 2 * max(tokens, 16)]
    for rows, width, warps, stages in itertools.product(
        (64, 128), widths, (4, 8), (2, 3, 4, 5, 6, 8)
    ):
        if rows * width <= 128 * 256:
            yield Tiles(rows, width, warps, stages)


def microseconds(x: Any, weights: list[Any], tiles: Tiles) -> float:
    """Of one product with each of the weights."""
    multiply = scaled_linear if isinstance(weights[0], ScaledWeight) else grouped_linear
    return graph_us([partial(multiply, x, weight, tiles=tiles) for weight in weights])


def best_tiles(x: Any, weights: list[Any], tokens: int) -> tuple[float, Tiles]:
    """The fastest tiles and their time."""
    found = []
    for tiles in tried(tokens):
        try:
            found.append((microseconds(x, weights, tiles), tiles))
        except OutOfResources:
            continue
    return min(found, key=lambda pair: pair[0])


def measure(model: str, formats: list[str], tokens: list[int]) -> Iterator[Figure]:
    """Time all products of a layer, and print a line for each."""
    for matrix, (rows, columns) in MODELS[model].matrices.items():
        if matrix == "lm_head":  # it stays plain
            continue
        plain = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) * columns**-0.5
        plains = [plain.clone() for _ in range(-(-ROTATED_BYTES // plain.nbytes))]
        for name in formats:
            first = quantize_weight(plain, FORMATS[name], DTYPE)
            copies = -(-ROTATED_BYTES // sum(t.nbytes for t in tensors_of(first)))
            weights = [first]
            weights += [quantize_weight(plain, FORMATS[name], DTYPE) for _ in range(1, copies)]
            served = [
                each
                if isinstance(each, ScaledWeight)
                else linear.arranged(replace(each, values=each.values.clone()))
                for each in weights
            ]
            for count in tokens:
                drawn = torch.randn(count, columns, device=DEVICE, dtype=DTYPE)
                x: Any = drawn
                operation: Any = linear.grouped_linear
                if isinstance(first, ScaledWeight):
                    x = quantize(drawn, first.input_format)
                    operation = linear.scaled_linear
                chosen = graph_us([partial(operation, x, weight) for weight in served])
                best, tiles = best_tiles(x, weights, count)
                cublas = graph_us([partial(torch.mm, drawn, w.t()) for w in plains])
                print(
                    f"{matrix:8} {name:18} {count:5} tokens: {chosen:8.1f} us, best {best:8.1f} us "
                    f"with {tiles}, bf16 {cublas:8.1f} us",
                    flush=True,
                )
                at = f"{model}/{matrix}/{name}/{count} tokens"
                yield Figure(f"{at}/chosen", chosen, "us")
                yield Figure(f"{at}/best", best, "us")
                yield Figure(f"{at}/bfloat16", cublas, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = list(measure(options.model, options.formats, options.tokens))
    if options.output is not None:
        write_rows(options.output, figures, command_line())


if __name__ == "__main__":
    main()
