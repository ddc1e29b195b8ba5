"""Tiles that cut a GEMM into one wave, which cuBLAS's heuristic often does not list.

In one wave a GEMM has as many programs as there are multiprocessors, or a few less, and all of them
end together. With other tiles some multiprocessors compute two tiles while others are idle, or the
sum over k is split and another kernel adds the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import cdiv

HEIGHTS = (64, 128, 192, 256)
MAX_WIDTH = 256
WIDTH_STEP = 8  # columns of a matrix instruction
MIN_BUSY = 0.7  # fraction of multiprocessors that have a tile
MAX_TILES = 2

# cublasLtMatmulTile_t, equal in cuBLAS 12.6 to 13.1. For each height: the number of the first tile
# of a series in which numbers rise with widths, and by width the tiles that had a number before
# that series and are not part of it. cuBLAS 13.1 divides by zero on a number that no tile has.
_NUMBERS = {
    64: (312, {8: 10, 32: 13, 64: 15, 96: 26, 128: 17, 192: 116, 256: 19}),
    128: (393, {32: 16, 64: 18, 96: 33, 128: 20, 160: 29, 192: 32, 256: 23}),
    192: (448, {64: 208, 128: 31, 192: 209, 256: 210}),
    256: (486, {32: 35, 64: 21, 128: 24, 192: 232}),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the output that one program computes: `height` features of `width` tokens."""

    height: int
    width: int

    @property
    def number(self) -> int:
        """The tile's cublasLtMatmulTile_t."""
        first, older = _NUMBERS[self.height]
        if self.width in older:
            return older[self.width]
        newer = [w for w in range(WIDTH_STEP, MAX_WIDTH + 1, WIDTH_STEP) if w not in older]
        return first + newer.index(self.width)


def one_wave_tiles(features: int, tokens: int, processors: int) -> list[Tile]:
    """Return up to `MAX_TILES` tiles with which `processors` programs cover `[tokens, features]`.

    Tiles that read the fewest values per output come first.
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
