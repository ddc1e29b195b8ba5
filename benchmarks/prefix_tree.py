"""Times the prefix cache when it is full: match, insert and evict of 2,048-token prompts.

    python benchmarks/prefix_tree.py [--blocks 1000000] [--output FILE.jsonl]

The pool is filled with prompts of ended sequences, in families that share their first 512 tokens.
Then each operation is timed over random prompts, so that the CPU's caches are cold, as in a
scheduler. `match` finds all blocks of a cached prompt, `insert` caches a
new prompt of a known family, `evict` allocates a prompt's blocks while every block is cached.
Also timed: `acquire` and `release` of a whole prompt.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.scheduler.core.kv.block_pool import BlockPool

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
SHARED_TOKENS = 512
FAMILY = 8  # prompts that begin alike
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE


def prompts(count: int, seed: int) -> list[bytes]:
    """Token ids of `count` prompts as bytes."""
    rng = np.random.default_rng(seed)
    shape = (-(-count // FAMILY), SHARED_TOKENS)
    heads = rng.integers(0, 128_000, shape, dtype=np.int32)
    tails = rng.integers(0, 128_000, (count, PROMPT_TOKENS - SHARED_TOKENS), dtype=np.int32)
    return [heads[i // FAMILY].tobytes() + tails[i].tobytes() for i in range(count)]


def hold(pool: BlockPool, data: bytes) -> list[int]:
    """Blocks of a prompt as at admission: shared ones, then new ones."""
    blocks = pool.match(data)
    pool.acquire(blocks)
    return blocks + pool.allocate(BLOCKS - len(blocks))


def fill(pool: BlockPool) -> list[bytes]:
    """Caches prompts until no block is free; returns those whose blocks are all cached."""
    known = []
    per_family = BLOCKS + (FAMILY - 1) * (PROMPT_TOKENS - SHARED_TOKENS) // BLOCK_SIZE
    for data in prompts(FAMILY * (pool.total // per_family), 0):
        blocks = hold(pool, data)
        pool.cache(blocks, data)
        pool.release(blocks)
        known.append(data)
    rest = pool.allocate(pool.free)
    others = np.random.default_rng(1).integers(0, 128_000, len(rest) * BLOCK_SIZE, np.int32)
    pool.cache(rest, others.tobytes())
    pool.release(rest)
    assert pool.free == 0
    return known


def _allocate(pool: BlockPool, blocks: list[int]) -> None:
    blocks += pool.allocate(BLOCKS)


def timed(operation: Callable[[], object]) -> float:
    """Microseconds of one call."""
    began = time.perf_counter()
    operation()
    return (time.perf_counter() - began) * 1e6


def measure(num_blocks: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each operation, `rounds` of each."""
    pool = BlockPool(num_blocks + 1, BLOCK_SIZE)
    known = fill(pool)
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    chosen = random.Random(2).choices(known, k=rounds)
    for data in chosen:
        times["match"].append(timed(partial(pool.match, data)))
        found = pool.match(data)
        assert len(found) == BLOCKS
        times["acquire"].append(timed(partial(pool.acquire, found)))
        times["release"].append(timed(partial(pool.release, found)))
    for data in prompts(rounds, 3):
        blocks: list[int] = []
        times["evict"].append(timed(partial(_allocate, pool, blocks)))
        times["insert"].append(timed(partial(pool.cache, blocks, data, proven=False)))
        pool.release(blocks)
    pool.check()
    return times


OPERATIONS = ("match", "insert", "evict", "acquire", "release")


def main() -> None:
    """Prints the figures, and writes them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    times = measure(args.blocks, args.rounds)
    microseconds = {
        name: {
            "mean": round(statistics.mean(taken), 1),
            "p50": round(statistics.median(taken), 1),
            "p99": round(float(np.percentile(taken, 99)), 1),
        }
        for name, taken in times.items()
    }
    print(f"{args.blocks:,} blocks, prompts of {PROMPT_TOKENS} tokens")
    for name, figures in microseconds.items():
        print(f"{name:8}", *(f"{key} {value:7.1f} us" for key, value in figures.items()), sep="  ")
    if args.output:
        write_rows(args.output, figures_of(microseconds, "microseconds"), command_line())


if __name__ == "__main__":
    main()
