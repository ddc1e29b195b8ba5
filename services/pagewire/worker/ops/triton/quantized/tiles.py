"""The tiles of GEMMs with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's tile: `rows` of the weight by `tokens`, computed by `warps` warps.

    `stages` steps of the loop are loading at once. `rows` is a multiple of 64, the height of a
    matrix instruction of Hopper.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def choose_tiles(tokens: int, features: int, item_size: int = 2) -> Tiles:
    """Choose tiles that hold all tokens, up to 128, for a weight with `features` rows.

    `item_size` is the bytes of an input. Inputs in float32 get tiles that fit shared memory.
    Timed on an H200: if there are few programs, each needs more loads in flight.
    """
    if item_size == 4:
        return Tiles(rows=64, tokens=16, warps=4, stages=2)
    if tokens > 256:
        return Tiles(rows=128, tokens=128, warps=8, stages=4)
    width = min(128, max(16, next_power_of_2(tokens)))
    programs = cdiv(features, 64) * cdiv(tokens, width)
    return Tiles(rows=64, tokens=width, warps=4, stages=5 if programs <= 176 else 3)
