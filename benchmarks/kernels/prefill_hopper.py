"""Time prefill attention on a Hopper GPU: the plain kernel and Hopper's own, in turns.

    PYTHONPATH=services:shared python3 benchmarks/kernels/prefill_hopper.py [--output FILE]

Both kernels read a plain cache and one in FP8. Each kernel is captured in a CUDA graph. The graphs
are replayed in turns, and the first place alternates, because a GPU at its power limit slows the
later graph. Rates are medians in TFLOP/s of the scores that the causal mask leaves. Results of both
kernels from the same cache are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pagewire.bench.kernels.inputs import Heads, paged, prefill_starts
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.ops.contract.blocks import FP8_LARGEST, MIN_SCALE, KVScales
from pagewire.worker.ops.device import is_hopper
from pagewire.worker.ops.triton.attention import prefill_hopper as hopper
from pagewire.worker.ops.triton.attention.prefill import prefill_attention, prefill_config

DEVICE = torch.device("cuda")
ROUNDS = 8  # the first is not counted
# (queries, tokens cached)
POINTS = {
    "1 x 8192": [(8192, 8192)],
    "4 x 2000": [(2000, 2000)] * 4,
    "8192 after 57,344": [(8192, 8192 + 57344)],
    "8192 after 112k": [(8192, 8192 + 112 * 1024)],
    "2048 after 120k": [(2048, 2048 + 120 * 1024)],
    "1 x 2048": [(2048, 2048)],
    "512 after 8192": [(512, 8704)],
    "64 after 8192": [(64, 8256)],
    "16 x 64 after 1000": [(64, 1064)] * 16,
    "64 x 16 after 500": [(16, 516)] * 64,
}

Call = Callable[[], Tensor]


def calls_of(heads: Heads, chunks: list[tuple[int, int]]) -> dict[str, Call]:
    counts = [count for count, _ in chunks]
    cache = paged([length for _, length in chunks], heads, DEVICE)
    k, v = cache.caches[0]
    q = torch.randn(sum(counts), heads.query, heads.dim, device=DEVICE, dtype=heads.dtype)
    places = (cache.tables, cache.slots, prefill_starts(counts, DEVICE), cache.lengths)
    scale, longest = heads.dim**-0.5, max(counts)
    rows = heads.query // heads.kv * longest

    def calls(k: Tensor, v: Tensor, scales: KVScales | None) -> tuple[Call, Call]:
        config = prefill_config(heads.dtype, heads.dim, rows, fp8=scales is not None)

        def plain() -> Tensor:
            return prefill_attention(q, k, v, *places, scale, longest, scales=scales, config=config)

        def of_hopper() -> Tensor:
            out = torch.empty_like(q)
            hopper.prefill(out, q, k, v, *places, scale, scales)
            return out

        return plain, of_hopper

    (keys, key_scales), (values, value_scales) = in_fp8(k), in_fp8(v)
    names = ("plain", "hopper", "plain, FP8", "hopper, FP8")
    both = calls(k, v, None) + calls(keys, values, KVScales(key_scales, value_scales))
    return dict(zip(names, both, strict=True))


def in_fp8(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The FP8 numbers and the scales of keys or values."""
    scales = (cache.abs().amax(-1).float() / FP8_LARGEST).clamp(min=MIN_SCALE)
    return (cache / scales[..., None]).to(torch.float8_e4m3fn), scales


def milliseconds(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(repeats):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(some) for name, some in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 1
    figures = []
    for heads in (Heads(32, 8), Heads(16, 8), Heads(32, 4)):
        for name, chunks in POINTS.items():
            torch.manual_seed(0)
            calls = calls_of(heads, chunks)
            results = [call().float() for call in calls.values()]
            differences = [
                float((plain - ours).norm() / plain.norm())
                for plain, ours in zip(results[::2], results[1::2], strict=True)
            ]
            scores = sum(n * (length - n) + n * (n + 1) // 2 for n, length in chunks)
            work = 4 * scores * heads.query * heads.dim
            took = milliseconds(calls, repeats=max(1, min(10, int(2e12 / work))))
            rates = {kernel: round(work / ms / 1e9, 1) for kernel, ms in took.items()}
            at = f"{heads}/{name}"
            figures += [Figure(f"{at}/{kernel}", rate, "TFLOP/s") for kernel, rate in rates.items()]
            for cache, difference in zip(("", ", FP8"), differences, strict=True):
                figures.append(Figure(f"{at}/difference{cache}", difference, "ratio"))
            shown = " ".join(f"{difference:.1e}" for difference in differences)
            print(f"{heads!s:24} {name:20} {rates}  differences {shown}", flush=True)
            del calls, results
            torch.cuda.empty_cache()
    if options.output:
        write_rows(options.output, figures, command_line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
