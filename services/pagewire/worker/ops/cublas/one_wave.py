"""Tiles that cut a matrix product into one wave, which cuBLAS's heuristics often do not name.

Such a product has as many programs as there are multiprocessors, or a few less, and all end
together. Without them some multiprocessors compute two tiles, or a sum is cut and its parts are
added by a kernel of their own, while others wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import cdiv

HEIGHTS = (64, 128, 192, 256)
MAX_WIDTH = 256
WIDTH_STEP = 8  # of matrix instructions
MIN_BUSY = 0.7  # of all multiprocessors
MAX_TILES = 2

# cublasLtMatmulTile_t, the same from cuBLAS 12.6 to 13.1 (which divides by zero when it is asked
# about numbers that no tile has): the first of the tiles of each height whose numbers follow one
# another as their widths do, and those that had a number before.
_NUMBERS = {
    64: (312, {8: 10, 32: 13, 64: 15, 96: 26, 128: 17, 192: 116, 256: 19}),
    128: (393, {32: 16, 64: 18, 96: 33, 128: 20, 160: 29, 192: 32, 256: 23}),
    192: (448, {64: 208, 128: 31, 192: 209, 256: 210}),
    256: (486, {32: 35, 64: 21, 128: 24, 192: 232}),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes of an output: `height` features of `width` tokens."""

    height: int
    width: int

    @property
    def number(self) -> int:
        """Its cublasLtMatmulTile_t."""
        first, older = _NUMBERS[self.height]
        if self.width in older:
            return older[self.width]
        newer = [w for w in range(WIDTH_STEP, MAX_WIDTH + 1, WIDTH_STEP) if w not in older]
        return first + newer.index(self.width)


def one_wave_tiles(features: int, tokens: int, processors: int) -> list[Tile]:
    """At most `MAX_TILES` tiles of which `processors` programs cover `[tokens, features]`.

    Those come first that read the least for what they compute.
    """
    tiles = []
    for height in HEIGHTS:
        rows = cdiv(features, height)
        columns = min(tokens, processors // rows)
        if not columns:
            continue
        width = cdiv(tokens, columns * WIDTH_STEP) * WIDTH_STEP
        programs = rows * cdiv(tokens, width)
        if width <= MAX_WIDTH and programs >= MIN_BUSY * processors:
            tiles.append(Tile(height, width))
    return sorted(tiles, key=lambda tile: tile.height + tile.width)[:MAX_TILES]
