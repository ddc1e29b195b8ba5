"""The tiles of products with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import next_power_of_2


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


def choose_tiles(tokens: int, item_size: int = 2) -> Tiles:
    """Choose tiles that hold all tokens, up to 128; they have not been measured yet.

    `item_size` is the bytes of an input. Inputs in float32 get tiles that fit shared memory.
    """
    if item_size == 4:
        return Tiles(rows=64, tokens=16, warps=4, stages=2)
    if tokens <= 64:
        return Tiles(rows=64, tokens=max(16, next_power_of_2(tokens)), warps=4, stages=4)
    return Tiles(rows=128, tokens=128, warps=8, stages=3)
