"""The choice of the kernel that multiplies FP8 weights with one scale per channel by few tokens."""

from __future__ import annotations

import torch

from pagewire.worker.ops.contract.quantized import ScaledWeight
from pagewire.worker.ops.device import multiprocessors
from pagewire.worker.ops.triton.quantized.fused_vector import VectorTiles
from pagewire.worker.ops.triton.streamed import scaled as streamed
from pagewire.worker.ops.triton.streamed.scaled_config import ScaledStream, fits, scaled_stream

# One token by `fused_vector` with these tiles, or by `streamed`; None is the kernel for any shape.
Choice = VectorTiles | ScaledStream | None

# For the shape of a weight: up to a number of tokens, what is fastest. Numbers increase.
MEASURED: dict[tuple[int, int], tuple[tuple[int, Choice], ...]] = {}
# Numbers of tokens for which weights of other shapes are streamed, with tiles by a rule.
STREAMED = range(0)


def choose(tokens: int, rows: int, k: int, programs: int, gated: bool = False) -> Choice:
    """Choose for a weight `[rows, k]` and a GPU of `programs` multiprocessors."""
    measured = MEASURED.get((rows, k))
    if measured is not None:
        return next((choice for most, choice in measured if tokens <= most), None)
    if tokens in STREAMED:
        config = scaled_stream(tokens, rows, k, programs, gated)
        return config if fits(config, k, gated=gated) else None
    return None


def stream_of(
    tokens: int, weight: ScaledWeight, dtype: torch.dtype, gated: bool = False
) -> ScaledStream | None:
    """Return the tiles of the streamed kernel if it computes this product, with results in
    `dtype`."""
    if not streamed.is_supported(tokens, weight, dtype):
        return None
    choice = choose(tokens, *weight.shape, multiprocessors(weight.values.device), gated)
    if not isinstance(choice, ScaledStream):
        return None
    if choice.tokens < tokens or not fits(choice, weight.shape[1], own=choice.own, gated=gated):
        return None
    return choice


def vector_tiles(weight: ScaledWeight) -> VectorTiles | None:
    """Return the measured tiles of `fused_vector`, or None."""
    choice = choose(1, *weight.shape, multiprocessors(weight.values.device))
    return choice if isinstance(choice, VectorTiles) else None
