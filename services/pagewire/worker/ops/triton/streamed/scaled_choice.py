"""Whether and how FP8 weights with one scale per channel are streamed for few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from pagewire.worker.ops.contract.quantized import ScaledWeight
from pagewire.worker.ops.device import multiprocessors
from pagewire.worker.ops.triton.streamed import scaled as streamed
from pagewire.worker.ops.triton.streamed.scaled_config import (
    ScaledStream,
    filled,
    fits,
    scaled_stream,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """For up to `tokens` tokens a program multiplies `rows` weight rows at a time, and fills
    `tiles` tiles at once. `own`: programs quantize a single token."""

    tokens: int
    rows: int
    tiles: int = 4
    own: bool = False


# The fastest of the tried tiles on an H200, by the shape of a weight: those of Llama-3.1-8B's
# matrices, then those of attention in Qwen3-30B-A3B.
MEASURED: dict[tuple[int, int], tuple[Tile, ...]] = {
    (28672, 4096): (Tile(1, 48, own=True), Tile(32, 48), Tile(64, 64, 2)),
    (4096, 14336): (Tile(32, 32), Tile(64, 64, 2)),
    (6144, 4096): (Tile(32, 64), Tile(64, 48, 2)),
    (4096, 4096): (Tile(1, 32, own=True), Tile(32, 64), Tile(64, 64, 2)),
    (5120, 2048): (Tile(1, 64, own=True), Tile(32, 64), Tile(64, 40)),
    (2048, 4096): (Tile(1, 32, own=True), Tile(32, 32), Tile(64, 32, 2)),
}
# Numbers of tokens for which weights of other shapes are streamed, with tiles by a rule.
STREAMED = range(2, 65)


@cache
def choose(
    tokens: int, rows: int, k: int, processors: int, gated: bool = False
) -> ScaledStream | None:
    """Choose the tiles for a weight `[rows, k]`; None if another kernel is faster."""
    for tile in MEASURED.get((rows, k), ()):
        if tokens <= tile.tokens:
            return filled(tile.rows, tokens, k, tile.tiles, own=tile.own)
    if tokens not in STREAMED:
        return None
    config = scaled_stream(tokens, rows, k, processors, gated)
    return config if fits(config, k, gated) else None


def stream_of(
    tokens: int, weight: ScaledWeight, dtype: torch.dtype, gated: bool = False
) -> ScaledStream | None:
    """Return the tiles of the streamed kernel if it computes this product, with results in
    `dtype`."""
    if not streamed.is_supported(tokens, weight, dtype):
        return None
    return choose(tokens, *weight.shape, multiprocessors(weight.values.device), gated)
