"""The tiles of GEMMs of FP8 weights and few tokens on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import cdiv, next_power_of_2

MAX_TOKENS = 64
SHARED_BYTES = 227 * 1024  # of a program
ALL_BYTES = 228 * 1024  # of a multiprocessor, 1 KB of it for the system in each program
ROOM = 205_000  # of a multiprocessor's bytes for tiles, so that a small kernel also fits
HALF_ROOM = 108_000  # for the programs of one kernel, so that those of the next one also fit
_OTHER = 1024  # of a program: barriers, reductions and alignment
_HEIGHT = 64
_COLUMNS = 128
_THREADS = 256  # of a program; Triton launches whole warp groups


@dataclass(frozen=True, slots=True)
class ScaledStream:
    """A program of `streamed.scaled` multiplies `rows` weight rows at a time by `tokens` tokens.

    `rows` is a multiple of 8, of 16 for gated products, and 64 at most. `stages` times `tiles`
    tiles of 128 columns are in shared memory, and are filled `tiles` at a time: 1, 2, 4 or 8.
    `programs` of them run on a multiprocessor. With `held` the input stays in shared memory, else
    its tiles follow the weights. `own` is for one token: programs quantize it.
    """

    rows: int
    tokens: int
    stages: int
    tiles: int = 4
    programs: int = 1
    held: bool = False
    own: bool = False
    registers: int = 96  # of a thread, so that programs of several kernels run at once


def part_of(rows: int) -> int:
    """Return the rows of a copy: the largest power of two that divides `rows`."""
    return rows & -rows


def shared_bytes(config: ScaledStream, k: int, *, own: bool) -> int:
    """Return the bytes of shared memory that a program takes, for a weight of `k` columns."""
    ahead = config.stages * config.tiles
    weights = _COLUMNS * (ahead * config.rows + _HEIGHT - config.rows)
    x_tiles = ahead
    if own:
        x_tiles = max(config.tiles, next_power_of_2(k) // _COLUMNS)
    elif config.held:
        x_tiles = cdiv(k, config.tiles * _COLUMNS) * config.tiles
    return weights + _COLUMNS * x_tiles * config.tokens + _OTHER


def fits(config: ScaledStream, k: int, *, own: bool = False, gated: bool = False) -> bool:
    """Tell whether the kernel can run with `config`."""
    taken = shared_bytes(config, k, own=own)
    return (
        config.rows % (16 if gated else 8) == 0
        and 8 <= config.rows <= _HEIGHT
        and config.tokens in (8, 16, 32, 64)
        and config.tiles in (1, 2, 4, 8)
        and config.stages >= 2
        and taken <= SHARED_BYTES
        and config.programs * (taken + 1024) <= ALL_BYTES
        and config.programs * config.registers * _THREADS <= 65536
    )


def _registers(tokens: int, tiles: int, own: int) -> int:
    """Return the registers of a thread without spills; with `own` columns of a token."""
    if own > 8192 or tokens * tiles > 128:
        return 168
    return 96 if tokens <= 16 else 128


def filled(
    rows: int,
    tokens: int,
    k: int,
    tiles: int = 4,
    programs: int = 1,
    *,
    held: bool = False,
    own: bool = False,
    room: int = ROOM,
    registers: int | None = None,
) -> ScaledStream:
    """Return the tiles with as many stages as fit into `room` bytes of a multiprocessor."""
    width = max(8, next_power_of_2(tokens))
    registers = registers or _registers(width, tiles, k if own else 0)
    depth = cdiv(k, _COLUMNS)
    each = room // programs
    of_stage = _COLUMNS * tiles * (rows + (0 if held or own else width))
    if own:
        each -= _COLUMNS * width * max(tiles, next_power_of_2(k) // _COLUMNS)
    elif held:
        each -= _COLUMNS * width * cdiv(depth, tiles) * tiles
    stages = max(2, each // of_stage)
    return ScaledStream(rows, width, stages, tiles, programs, held, own, registers)


def scaled_stream(
    tokens: int, rows: int, k: int, programs: int = 132, gated: bool = False
) -> ScaledStream:
    """Choose the tiles for a weight `[rows, k]` where no measurement tells them.

    Each of `programs` multiprocessors gets nearly the same number of rows.
    """
    step = 16 if gated else 8
    heights = range(64, 23 if rows > 24 * programs else step - 1, -step)

    def waste(height: int) -> tuple[float, int]:
        rounds = cdiv(cdiv(rows, height), programs)
        return round(rounds * height * programs / rows, 2), -height

    height = min(heights, key=waste)
    tiles = 2 if tokens > 32 or k <= 1024 else 4
    held = k * max(8, next_power_of_2(tokens)) <= 64 * 1024
    return filled(height, tokens, k, tiles, held=held)
