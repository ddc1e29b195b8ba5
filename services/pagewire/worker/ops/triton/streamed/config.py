"""The tiles of GEMMs of few tokens on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import next_power_of_2

MAX_BYTES = 160_000  # of shared memory that tiles take
MIN_PROGRAMS = 60
MAX_STREAMED = 32  # tokens up to which weights are copied by the copy engine, on Hopper


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A program of `streamed.gemm` multiplies `rows` weight rows by `tokens` tokens.

    `stages` times `tiles` tiles of 64 columns are in shared memory, and are filled `tiles` at a
    time.
    """

    rows: int
    tokens: int
    stages: int
    tiles: int = 2


def stream_config(tokens: int, rows: int, k: int, gated: bool = False) -> StreamConfig:
    """Choose the tiles for a weight `[rows, k]` and up to MAX_STREAMED tokens.

    Programs have as many rows as leave MIN_PROGRAMS of them. Shared memory holds all of a program's
    weights if they fit; they are then loaded while the kernels before this one run.
    """
    columns = max(8, next_power_of_2(tokens))
    least = 16 if gated else 8
    height = max(least, min(64, 1 << (rows // MIN_PROGRAMS).bit_length() - 1))
    of_tile = 128 * (height + columns)
    depth = -(-k // 64)
    room = MAX_BYTES // of_tile
    tiles = 4 if depth % 4 == 0 and room >= 16 else 2
    return StreamConfig(height, columns, max(2, min(depth, room) // tiles), tiles)
