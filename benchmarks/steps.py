"""Times steps on a GPU: decode steps, single and chained back to back, and steps with a prompt.

    python benchmarks/steps.py --model DIR [--profile] [--output FILE.jsonl]

DIR needs only a config.json: the weights are random. `graph` is the median of replays of the
captured step. `chained` is the time of a step when steps are submitted one ahead, with host work
and copies. The difference is the idle time of the device.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.config import WorkerConfig
from pagewire.sampling import SamplingNumbers
from pagewire.worker.protocol.steps.device_plan import (
    Chunks,
    DevicePlan,
    SlotStarts,
    TableWrites,
    slot_numbers,
)
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import GraphBackend, Layers, Variant, decode_buckets
from pagewire.worker.startup.loading import load_worker

# Rows and their KV tokens.
POINTS = [
    (1, 504),
    (8, 720),
    (16, 720),
    (32, 720),
    (64, 720),
    (128, 720),
    (256, 720),
    (64, 2048),
    (512, 768),
]
# Rows, their KV tokens, prompt tokens in the same step, and prompt tokens computed before.
MIXED = [
    (30, 600, 98, 200),
    (30, 600, 226, 200),
    (30, 600, 470, 0),
    (30, 600, 4000, 0),
    (200, 600, 1000, 0),
]
PROFILED = [(32, 720), (64, 720), (256, 720), (512, 768)]


def start_plan(limits: Limits, rows: int, blocks: np.ndarray) -> DevicePlan:
    """Assigns each of `rows` slots its row of `blocks [rows, columns]` and sampling at 0.6."""
    slots = np.arange(rows, dtype=np.int32)
    columns = blocks.shape[1]

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(rows, value, dtype)

    return DevicePlan(
        starts=SlotStarts(
            slots=slots,
            numbers=slot_numbers([SamplingNumbers(temperature=0.6)] * rows),
            seed=np.arange(rows, dtype=np.int64),
            min_tokens=full(0, np.int32),
            stop_token_ids=np.full((rows, 16), -1, np.int32),
            adjustment_kinds=full(0, np.int32),
        ),
        writes=TableWrites(
            slots=np.repeat(slots, columns),
            columns=np.tile(np.arange(columns, dtype=np.int32), rows),
            blocks=blocks.ravel().astype(np.int32),
        ),
        **decode_fields(slots, 0),
    )


def decode_fields(slots: np.ndarray, position: int) -> dict:
    """The computed part of a plan in which `slots` decode at `position`."""
    positions = np.full(len(slots), position, np.int32)
    return {
        "decode_slots": slots,
        "decode_positions": positions,
        "chunks": None,
        "sample_slots": slots,
        "sample_indices": positions,
        "filtered": False,
    }


def decode_plan(rows: int, position: int) -> DevicePlan:
    """A steady decode step of slots 0 to rows - 1."""
    return DevicePlan(
        starts=None,
        writes=None,
        **decode_fields(np.arange(rows, dtype=np.int32), position),
    )


def mixed_plan(rows: int, position: int, count: int, before: int) -> DevicePlan:
    """The same with `count` prompt tokens, after `before` others, in the next slot."""
    slots = np.arange(rows, dtype=np.int32)
    chunk = Chunks(
        slots=np.array([rows], np.int32),
        starts=np.array([0, count], np.int32),
        tokens=np.arange(count, dtype=np.int32),
        positions=before + np.arange(count, dtype=np.int32),
        lengths=np.array([before + count], np.int32),
        samples=np.array([False]),
        following=np.zeros(1, np.int32),
    )
    fields = decode_fields(slots, position) | {"chunks": chunk}
    return DevicePlan(starts=None, writes=None, **fields)


def graph_ms(backend: GraphBackend, rows: int, repeats: int = 60) -> float:
    """Median time of replaying the graph that serves `rows` rows."""
    captured = next(
        backend._captured[Variant(Layers(bucket), filtered=False)]
        for bucket in decode_buckets(backend.limits)
        if bucket >= rows
    )
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def chained_ms(backend: GraphBackend, plan: DevicePlan, steps: int = 100) -> float:
    """Time a step when each step is submitted before the host waits for the previous one."""
    backend.wait(backend.submit(plan))
    begin = time.perf_counter()
    handle = backend.submit(plan)
    for _ in range(steps - 1):
        following = backend.submit(plan)
        backend.wait(handle)
        handle = following
    backend.wait(handle)
    return (time.perf_counter() - begin) / steps * 1e3


def profile(backend: GraphBackend, plan: DevicePlan) -> str:
    """The time of a step by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(5):
            backend.wait(backend.submit(plan))
    return str(
        prof.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60)
    )


def give_blocks(backend: GraphBackend, slots: int, tokens: int) -> None:
    """Fills the first slots with a number of tokens each, in shuffled blocks."""
    limits = backend.limits
    columns = -(-tokens // limits.block_size)
    blocks = 1 + np.random.default_rng(0).permutation(limits.num_blocks - 1)[: slots * columns]
    backend.wait(backend.submit(start_plan(limits, slots, blocks.reshape(slots, columns))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    worker = load_worker(WorkerConfig(model=options.model, load_format="dummy", num_slots=512))
    backend = worker.backend
    assert isinstance(backend, GraphBackend)
    loaded = time.perf_counter()
    backend.warm_up()
    ready = time.perf_counter()
    print(f"loaded in {loaded - begin:.1f} s, warm in {ready - loaded:.1f} s more", flush=True)
    figures: dict[str, Any] = {"load_seconds": loaded - begin, "warm_up_seconds": ready - loaded}
    for rows, context in POINTS:
        give_blocks(backend, rows, context + 1)
        plan = decode_plan(rows, context)
        chained = chained_ms(backend, plan)
        graph = graph_ms(backend, rows)
        figures[f"{rows} rows of {context} tokens"] = {"graph_ms": graph, "chained_ms": chained}
        print(
            f"B={rows:4d} ctx={context:5d}: graph {graph:7.3f} ms, chained {chained:7.3f} ms, "
            f"{rows / chained * 1e3:9.0f} tok/s, idle {100 * (1 - graph / chained):4.1f} %",
            flush=True,
        )
        if options.profile and (rows, context) in PROFILED:
            print(profile(backend, plan), flush=True)
    for rows, context, count, before in MIXED:
        give_blocks(backend, rows + 1, max(context + 1, before + count))
        plan = mixed_plan(rows, context, count, before)
        chained = chained_ms(backend, plan)
        prompt = f"{count} prompt tokens after {before}"
        figures[f"{rows} rows of {context} tokens, {prompt}"] = {"chained_ms": chained}
        print(f"B={rows:4d} ctx={context:5d} + {count:4d} behind {before}: {chained:7.3f} ms")
        if options.profile:
            print(profile(backend, plan), flush=True)
    if options.output:
        name = Path(options.model).name
        write_rows(options.output, figures_of(figures, name), command_line())


if __name__ == "__main__":
    main()
