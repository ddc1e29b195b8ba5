"""The tiles of GEMMs of few tokens on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import next_power_of_2

MAX_BYTES = 205_000  # of shared memory that tiles take
# Up to this many tokens the kernel is faster than cuBLAS: for any weight, and for one of at most
# SMALL values.
MAX_TOKENS = 32
MAX_TOKENS_OF_SMALL = 64
SMALL = 1 << 23


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


def streams(tokens: int, rows: int, k: int) -> bool:
    """Tell whether the kernel is meant for `tokens` tokens and a weight `[rows, k]`."""
    return 1 <= tokens <= (MAX_TOKENS_OF_SMALL if rows * k <= SMALL else MAX_TOKENS)


def stream_config(tokens: int, rows: int, k: int, gated: bool = False) -> StreamConfig:
    """Choose the tiles for a weight `[rows, k]`; measured on an H100.

    Programs have as many rows as possible with about one program for each multiprocessor. Fewer
    programs are enough if shared memory holds all weights of a program, because these are loaded
    while earlier kernels run. With more tokens, tiles of few rows would read the tokens too often.
    """
    columns = max(8, next_power_of_2(tokens))
    depth = -(-k // 64)
    few = tokens <= MAX_TOKENS
    least = 16 if gated else 8

    def enough(height: int) -> bool:
        of_tile = 128 * (height + columns)
        whole = few and depth * of_tile <= MAX_BYTES
        return rows // height >= (32 if whole or height <= 16 else 90 if few else 60)

    height = next((h for h in (64, 32, 16) if enough(h)), least)
    tiles = 4 if depth % 4 == 0 else 2
    room = MAX_BYTES // (128 * (height + columns) * tiles)
    return StreamConfig(height, columns, max(2, min(room, -(-depth // tiles))), tiles)
