"""Tiles that cut a product into one wave."""

from hypothesis import given
from hypothesis import strategies as st

from pagewire.worker.ops.cublas.one_wave import (
    HEIGHTS,
    MAX_TILES,
    MAX_WIDTH,
    MIN_BUSY,
    WIDTH_STEP,
    Tile,
    one_wave_tiles,
)


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(1, 200))
def test_one_wave_covers_the_output(features: int, tokens: int, processors: int) -> None:
    tiles = one_wave_tiles(features, tokens, processors)
    assert len(tiles) <= MAX_TILES
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.height in HEIGHTS
        assert tile.width in range(WIDTH_STEP, MAX_WIDTH + 1, WIDTH_STEP)
        programs = -(-features // tile.height) * -(-tokens // tile.width)
        assert MIN_BUSY * processors <= programs <= processors


def test_those_of_an_h200() -> None:
    """The fastest ones found there: benchmarks/results/serving-h200.json at e4b6174, `one wave`."""
    assert one_wave_tiles(4096, 144, 132) == [Tile(64, 72), Tile(128, 40)]
    assert one_wave_tiles(4096, 384, 132)[0] == Tile(128, 96)
    assert one_wave_tiles(6144, 448, 132)[0] == Tile(192, 112)
    assert one_wave_tiles(28672, 400, 132) == []
    assert one_wave_tiles(4096, 8192, 132) == []


def test_numbers_are_those_of_the_library() -> None:
    """cublasLtMatmulTile_t of cuBLAS 13.1."""
    numbers = {
        (64, 8): 10,
        (64, 16): 312,
        (64, 72): 317,
        (64, 248): 336,
        (64, 256): 19,
        (128, 8): 393,
        (128, 104): 402,
        (128, 248): 417,
        (192, 112): 460,
        (192, 248): 475,
        (192, 256): 210,
        (256, 64): 21,
        (256, 72): 492,
        (256, 256): 513,
    }
    assert {size: Tile(*size).number for size in numbers} == numbers
    every = [Tile(h, w).number for h in HEIGHTS for w in range(8, 257, 8)]
    assert len(set(every)) == len(every) == 128
