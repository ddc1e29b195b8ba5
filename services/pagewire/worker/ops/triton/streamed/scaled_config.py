"""The tiles of GEMMs of FP8 weights and few tokens on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import cdiv, next_power_of_2

MAX_TOKENS = 64
SHARED_BYTES = 227 * 1024  # of a program
ROOM = 205_000  # of these for tiles, so that a program of a small kernel also fits
_OTHER = 1024  # of a program: barriers, reductions and alignment
_HEIGHT = 64
_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class ScaledStream:
    """A program of `streamed.scaled` multiplies `rows` weight rows at a time by `tokens` tokens.

    `rows` is a multiple of 8, of 16 for gated products, and 64 at most. `stages` times `tiles`
    tiles of 128 columns are in shared memory, and are filled `tiles` at a time: 2 or 4.
    `own` is for one token: programs quantize it. A thread has `registers` at most, so that programs
    of several kernels run at once.
    """

    rows: int
    tokens: int
    stages: int
    tiles: int = 4
    own: bool = False
    registers: int = 96


def part_of(rows: int) -> int:
    """Return the rows of a copy: the largest power of two that divides `rows`."""
    return rows & -rows


def held_tiles(k: int, tiles: int) -> int:
    """Return the tiles of a token of `k` values that a program quantizes."""
    return max(tiles, next_power_of_2(k) // _COLUMNS)


def shared_bytes(config: ScaledStream, k: int) -> int:
    """Return the bytes of shared memory that a program takes, for a weight of `k` columns."""
    ahead = config.stages * config.tiles
    weights = _COLUMNS * (ahead * config.rows + _HEIGHT - config.rows)
    x_tiles = held_tiles(k, config.tiles) if config.own else ahead
    return weights + _COLUMNS * x_tiles * config.tokens + _OTHER


def fits(config: ScaledStream, k: int, gated: bool = False) -> bool:
    """Tell whether the kernel can run with `config`."""
    return (
        config.rows % (16 if gated else 8) == 0
        and 8 <= config.rows <= _HEIGHT
        and config.tokens in (8, 16, 32, 64)
        and config.tiles in (2, 4)
        and config.stages >= 2
        and shared_bytes(config, k) <= SHARED_BYTES
    )


def _registers(tokens: int, tiles: int, own: int) -> int:
    """Return the registers of a thread without spills; with `own` columns of a token."""
    if own > 8192 or tokens * tiles > 128:
        return 168
    return 96 if tokens <= 16 else 128


def filled(rows: int, tokens: int, k: int, tiles: int = 4, *, own: bool = False) -> ScaledStream:
    """Return the tiles with as many stages as fit."""
    width = max(8, next_power_of_2(tokens))
    each, of_stage = ROOM, _COLUMNS * tiles * rows
    if own:
        each -= _COLUMNS * width * held_tiles(k, tiles)
    else:
        of_stage += _COLUMNS * tiles * width
    stages = max(2, each // of_stage)
    return ScaledStream(rows, width, stages, tiles, own, _registers(width, tiles, own and k))


def scaled_stream(
    tokens: int, rows: int, k: int, processors: int = 132, gated: bool = False
) -> ScaledStream:
    """Choose the tiles for a weight `[rows, k]` where no measurement tells them.

    Each of `processors` multiprocessors gets nearly the same number of rows.
    """
    step = 16 if gated else 8
    heights = range(64, 23 if rows > 24 * processors else step - 1, -step)

    def waste(height: int) -> tuple[float, int]:
        rounds = cdiv(cdiv(rows, height), processors)
        return round(rounds * height * processors / rows, 2), -height

    height = min(heights, key=waste)
    return filled(height, tokens, k, 2 if tokens > 32 or k <= 1024 else 4)
