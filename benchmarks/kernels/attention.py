"""Time the attention and RoPE kernels on one NVIDIA GPU.

    PYTHONPATH=services:shared python3 benchmarks/kernels/attention.py [--sweep] [--output FILE]

Kernels are timed in CUDA graphs that rotate over several KV caches, so that no call finds its keys
and values in the L2 cache. With `--sweep` many schedules are timed at every point and the best ones
are printed beside the configured one. A table follows at the end. `tests/kernels` checks the
results of the kernels, on a GPU if one is available.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewire.bench.kernels.inputs import Heads, paged, prefill_starts, rope_inputs
from pagewire.bench.kernels.timing import Ceilings, graph_us, measure_ceilings
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.ops.triton import rope
from pagewire.worker.ops.triton.attention import decode as attention_decode
from pagewire.worker.ops.triton.attention import prefill as attention_prefill
from pagewire.worker.ops.triton.attention.decode import DecodeConfig
from pagewire.worker.ops.triton.attention.prefill import PrefillConfig
from pagewire.worker.ops.triton.rope import RopeKernelConfig

DEVICE = torch.device("cuda")
WORKERS = 14


def copies_beyond_cache(size: int) -> int:
    """Return how many buffers of `size` bytes together outgrow the L2 cache several times."""
    return max(1, min(8, math.ceil(3e8 / size)))


@dataclass(frozen=True, slots=True)
class Point:
    """A workload: its computation, and the bytes or operations that bound it."""

    name: str
    bound: float  # bytes, or floating-point operations
    unit: str  # "TB/s" or "TFLOP/s"
    run: Callable[[Any], list[Callable[[], object]]]  # config (or None) -> calls to time


def decode_point(name: str, heads: Heads, lengths: list[int]) -> Callable[[], Point]:
    def make() -> Point:
        size = heads.kv_bytes(sum(lengths))
        cache = paged(lengths, heads, DEVICE, copies_beyond_cache(size))
        q = torch.randn(len(lengths), heads.query, heads.dim, device=DEVICE, dtype=heads.dtype)
        arguments = (cache.tables, cache.slots, cache.lengths, heads.dim**-0.5)

        def run(config: DecodeConfig | None) -> list[Callable[[], object]]:
            calls: list[Callable[[], object]] = [
                partial(attention_decode.decode_attention, q, k, v, *arguments, config=config)
                for k, v in cache.caches
            ]
            return calls * (8 if size < 3e7 else 2)

        traffic = size + 2 * q.numel() * q.element_size()
        return Point(f"decode {name} {heads}", traffic, "TB/s", run)

    return make


def prefill_point(name: str, heads: Heads, chunks: list[tuple[int, int]]) -> Callable[[], Point]:
    def make() -> Point:
        counts = [count for count, _ in chunks]
        cache = paged([length for _, length in chunks], heads, DEVICE)
        (k, v), starts = cache.caches[0], prefill_starts(counts, DEVICE)
        q = torch.randn(sum(counts), heads.query, heads.dim, device=DEVICE, dtype=heads.dtype)
        scores = sum(n * (length - n) + n * (n + 1) // 2 for n, length in chunks)
        arguments = (cache.tables, cache.slots, starts, cache.lengths, heads.dim**-0.5, max(counts))

        def run(config: PrefillConfig | None) -> list[Callable[[], object]]:
            def call() -> object:
                return attention_prefill.prefill_attention(q, k, v, *arguments, config=config)

            return [call] * 3

        operations = 4 * scores * heads.query * heads.dim
        return Point(f"prefill {name} {heads}", operations, "TFLOP/s", run)

    return make


def rope_point(heads: Heads, tokens: int) -> Callable[[], Point]:
    def make() -> Point:
        inputs = rope_inputs(heads, tokens, DEVICE)
        size = inputs.qkv.numel() * inputs.qkv.element_size()
        copies = copies_beyond_cache(size)
        rows = [torch.randn_like(inputs.qkv) for _ in range(copies)]
        caches = [
            [torch.zeros(inputs.shape, device=DEVICE, dtype=heads.dtype) for _ in range(2)]
            for _ in range(copies)
        ]

        def run(config: RopeKernelConfig | None) -> list[Callable[[], object]]:
            calls: list[Callable[[], object]] = [
                partial(rope.qk_norm_rope_kv_write, qkv, *inputs.arguments(), *pair, config=config)
                for qkv, pair in zip(rows, caches, strict=True)
            ]
            return calls * 2

        traffic = 2 * size + inputs.cos_sin.shape[1] * 4 * tokens
        return Point(f"rope {tokens} {heads}", traffic, "TB/s", run)

    return make


def points() -> Iterator[Callable[[], Point]]:
    for heads in (Heads(16, 8), Heads(32, 8)):
        for rows, length in ((1, 504), (1, 4096), (1, 32768), (8, 720), (64, 2048), (256, 720)):
            yield decode_point(f"{rows}x{length}", heads, [length] * rows)
        yield decode_point("63x500+1x32k", heads, [500] * 31 + [32768] + [500] * 32)
        yield prefill_point("8192", heads, [(8192, 8192)])
        yield prefill_point("2048", heads, [(2048, 2048)])
        yield prefill_point("4x2000+192", heads, [(2000, 2000)] * 4 + [(192, 192)])
        yield prefill_point("2048 after 6144", heads, [(2048, 8192)])
        yield prefill_point("64x16 after 500", heads, [(16, 516)] * 64)
        yield prefill_point("16x64 after 1000", heads, [(64, 1064)] * 16)
        for tokens in (1, 64, 512, 4096):
            yield rope_point(heads, tokens)
    for heads in (Heads(32, 8, 64), Heads(14, 2, 64)):
        for rows, length in ((1, 504), (64, 2048)):
            yield decode_point(f"{rows}x{length}", heads, [length] * rows)
        yield prefill_point("8192", heads, [(8192, 8192)])


def sweep(kind: str) -> list[Any]:
    """Return schedules to try: the configured ones and their neighbours."""
    if kind == "decode":
        loops = [(16, 1, 2), (32, 1, 2), (32, 2, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2)]
        return [
            DecodeConfig(*loop, programs, share)
            for loop in loops
            for programs in (2, 3, 4, 8)
            for share in (64, 128)
        ]
    if kind == "prefill":
        two_at_once = [(128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 3), (64, 32, 4, 2)]
        tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)]
        return [
            *(PrefillConfig(*tile, registers=128) for tile in two_at_once),
            *(PrefillConfig(*tile) for tile in tiles),
        ]
    return [
        RopeKernelConfig(tokens, heads, warps)
        for tokens in (1, 2, 4)
        for heads in (4, 8)
        for warps in (2, 4)
    ]


def compile_ahead(task: tuple[str, Any, Heads, int]) -> None:
    """Fill Triton's disk cache with one variant; a variant that does not fit is left out."""
    kind, config, heads, rows = task
    try:
        if kind == "decode":
            decode_point("", heads, [16] * rows)().run(config)[0]()
        elif kind == "prefill":
            prefill_point("", heads, [(16, 16)] * rows)().run(config)[0]()
        else:
            rope_point(heads, 16)().run(config)[0]()
        torch.cuda.synchronize()
    except Exception as fault:
        print(kind, config, repr(fault)[:200], file=sys.stderr)


def compile_all() -> None:
    """Compile the variants of the sweep, some at a time."""
    tasks = []
    for heads in (Heads(16, 8), Heads(32, 8), Heads(32, 8, 64), Heads(14, 2, 64)):
        # Programs and shares are arguments: they do not make a variant.
        decode = {(c.tile, c.warps, c.stages): c for c in sweep("decode")}
        tasks += [("decode", c, heads, rows) for c in decode.values() for rows in (1, 8, 256)]
        tasks += [("prefill", c, heads, rows) for c in sweep("prefill") for rows in (1, 64)]
        tasks += [("rope", c, heads, 0) for c in sweep("rope")]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, tasks, chunksize=1))


def figures(ceilings: Ceilings, results: list[dict]) -> Iterator[Figure]:
    yield Figure("ceiling/copy", ceilings.copy_tb_per_s, "TB/s")
    yield Figure("ceiling/matrix product", ceilings.matmul_tflop_per_s, "TFLOP/s")
    for row in results:
        name = f"{row['point']}/{short(row['config'])}"
        yield Figure(f"{name}/microseconds", row["microseconds"], "us")
        yield Figure(f"{name}/rate", row["rate"], row["unit"])


def timed(point: Point, config: Any) -> dict:
    elapsed = graph_us(point.run(config)) / 1e6
    return {
        "point": point.name,
        "config": None if config is None else asdict(config),
        "microseconds": round(elapsed * 1e6, 2),
        "rate": round(point.bound / elapsed / 1e12, 3),
        "unit": point.unit,
    }


def measure(swept: bool, deadline: float) -> list[dict]:
    results = []
    for make in points():
        torch.manual_seed(0)
        point = make()
        results.append(timed(point, None))
        for config in sweep(point.name.split()[0]) if swept else []:
            if time.monotonic() > deadline:
                break
            try:
                results.append(timed(point, config))
            except Exception as fault:
                print(point.name, config, repr(fault)[:200], file=sys.stderr)
        del point
        torch.cuda.empty_cache()
    return results


def short(config: dict | None) -> str:
    return "configured" if config is None else " ".join(f"{k}={v}" for k, v in config.items())


def print_table(results: list[dict], best: int) -> None:
    for name, rows in itertools.groupby(results, key=lambda row: row["point"]):
        first, *others = rows
        for row in [first, *sorted(others, key=lambda row: row["microseconds"])[:best]]:
            rate = f"{row['rate']:8.3f} {row['unit']}"
            print(f"{name:42} {row['microseconds']:10.1f} us {rate:16} {short(row['config'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time many schedules")
    parser.add_argument("--output", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--limit", type=float, default=250, help="seconds after which no more is swept"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit

    if options.sweep:
        compile_all()
        print(f"compiled, {deadline - time.monotonic():.0f} s left", file=sys.stderr)
    ceilings = measure_ceilings()
    results = measure(options.sweep, deadline)
    if options.output:
        write_rows(options.output, figures(ceilings, results), command_line())
    print_table(results, best=3)
    print(torch.cuda.get_device_name(), ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
