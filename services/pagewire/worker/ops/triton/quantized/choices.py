"""Which kernel multiplies FP8 weights on Hopper: that of `hopper`, with its tiles, or the plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pagewire.worker.ops.integers import cdiv

BLOCK_K = 128  # products that the tensor cores add up
HALF = 64  # tokens of a matrix instruction
SIDE = 128  # weight rows of a consumer
MAX_PARTS = 4
# For fewer tokens, the plain kernel has smaller tiles. For more than MAX_PLAIN_TOKENS it is slower.
MIN_TOKENS = 65
MAX_PLAIN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile of a program: each consumer has `halves` times 64 tokens, by 128 features.

    With `beside` the consumers share the tokens, else the features. `stages` tiles of inputs are in
    shared memory. Inputs are copied in boxes of `box` tokens.
    """

    consumers: int
    halves: int
    beside: bool
    stages: int
    box: int = 64

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return self.halves * HALF * (1 if self.beside else self.consumers)

    @property
    def columns(self) -> int:
        """Weight rows of a tile."""
        return SIDE * (self.consumers if self.beside else 1)


TALL = Shape(2, 2, False, 4)
WIDE = Shape(2, 2, True, 4)
SMALL = Shape(2, 1, False, 6)
THREE = Shape(3, 1, False, 5)
FINE = Shape(3, 1, False, 5, box=16)
LOW = Shape(2, 1, True, 5)
SHAPES = (TALL, WIDE, SMALL, THREE, FINE, LOW)


@dataclass(frozen=True, slots=True)
class Choice:
    """The tiles of a product, and how many programs share each tile of the last round.

    Without a shape, the plain kernel computes the product, and no activation.
    """

    shape: Shape | None
    parts: int = 1


PLAIN = Choice(None)

# Steps of more tokens are rare. Up to 8,192 were measured.
MANY = 65_536

# The fastest choices on an H200, by weight rows, K, and whether the product computes SiLU times
# values. The keys inside are numbers of tokens: a choice holds for more tokens than the key before
# it, or for MIN_TOKENS and more, up to its own key. The matrices are those of Llama-3.1-8B, and
# those of attention in Qwen3-30B-A3B.
TILES: dict[tuple[int, int, bool], dict[int, Choice]] = {
    (6144, 4096, False): {
        128: PLAIN,
        192: Choice(SMALL),
        320: Choice(LOW),
        384: Choice(THREE),
        640: Choice(TALL),
        800: Choice(THREE),
        1024: Choice(SMALL),
        MANY: Choice(THREE),
    },
    (4096, 4096, False): {
        256: PLAIN,
        512: Choice(LOW),
        800: Choice(THREE),
        1024: Choice(TALL),
        MANY: Choice(WIDE),
    },
    (28672, 4096, False): {
        128: Choice(WIDE),
        152: Choice(FINE),
        192: Choice(THREE),
        256: Choice(TALL),
        320: Choice(THREE),
        384: Choice(WIDE),
        448: Choice(LOW),
        512: Choice(SMALL),
        800: Choice(THREE),
        MANY: Choice(TALL),
    },
    (28672, 4096, True): {
        128: Choice(WIDE),
        192: Choice(THREE),
        256: Choice(WIDE),
        384: Choice(THREE),
        640: PLAIN,
        800: Choice(THREE),
        1024: Choice(WIDE),
        MANY: Choice(THREE),
    },
    (4096, 14336, False): {
        128: Choice(SMALL, 4),
        160: Choice(THREE, 4),
        256: Choice(SMALL, 2),
        384: Choice(THREE, 2),
        512: Choice(LOW),
        800: Choice(THREE),
        2048: Choice(TALL),
        MANY: Choice(WIDE),
    },
    (2048, 4096, False): {
        128: Choice(LOW, 4),
        192: Choice(SMALL, 4),
        256: PLAIN,
        320: Choice(SMALL, 2),
        512: Choice(LOW),
        2048: Choice(SMALL),
        MANY: Choice(THREE),
    },
    (5120, 2048, False): {
        128: PLAIN,
        384: Choice(SMALL),
        512: Choice(THREE),
        800: Choice(TALL),
        2048: Choice(THREE),
        MANY: Choice(TALL),
    },
}


@cache
def choose(
    tokens: int, rows: int, k: int, processors: int, gated: bool = False, shared: bool = True
) -> Choice:
    """Choose the kernel of a product with a weight `[rows, k]`.

    Without `shared`, no tile is shared, so that the bits do not depend on the number of tokens. A
    measured choice may have too many sharers for a GPU of fewer processors.
    """
    found = _measured(tokens, rows, k, gated)
    if found is not None and _is_possible(found, tokens, rows, k, processors, shared):
        return found
    return min(
        _candidates(tokens, rows, k, processors, gated, shared),
        key=lambda choice: estimate(choice, tokens, rows, k, processors),
    )


def _measured(tokens: int, rows: int, k: int, gated: bool) -> Choice | None:
    if tokens < MIN_TOKENS:
        return None
    buckets = TILES.get((rows, k, gated), {})
    return next((choice for limit, choice in buckets.items() if tokens <= limit), None)


def _is_possible(
    choice: Choice, tokens: int, rows: int, k: int, processors: int, shared: bool
) -> bool:
    if choice.shape is None or choice.parts == 1:
        return True
    return shared and is_shareable(choice.shape, choice.parts, tokens, rows, k, processors)


def _candidates(
    tokens: int, rows: int, k: int, processors: int, gated: bool, shared: bool
) -> Iterator[Choice]:
    if tokens < MIN_TOKENS:
        yield PLAIN
        return
    if tokens <= MAX_PLAIN_TOKENS and not gated:
        yield PLAIN
    for shape in SHAPES:
        for parts in range(1, MAX_PARTS + 1 if shared else 2):
            if is_shareable(shape, parts, tokens, rows, k, processors):
                yield Choice(shape, parts)


@dataclass(frozen=True, slots=True)
class Work:
    """How tiles are divided: `whole` tiles first, then several programs share each other one."""

    tiles: int
    whole: int
    programs: int


def divide(shape: Shape, parts: int, tokens: int, rows: int, processors: int) -> Work:
    """Divide the tiles of a product among the programs."""
    tiles = cdiv(tokens, shape.rows) * cdiv(rows, shape.columns)
    if parts == 1:
        return Work(tiles, tiles, min(tiles, processors))
    rest = tiles % processors
    return Work(tiles, tiles - rest, processors if tiles > processors else rest * parts)


def is_shareable(shape: Shape, parts: int, tokens: int, rows: int, k: int, processors: int) -> bool:
    """Tell whether `parts` programs can share each tile of the last round."""
    work = divide(shape, parts, tokens, rows, processors)
    rest = work.tiles - work.whole
    # All sharers run at once, since they wait for each other.
    return parts == 1 or (0 < rest * parts <= processors and parts <= k // BLOCK_K)


def estimate(choice: Choice, tokens: int, rows: int, k: int, processors: int) -> float:
    """Estimate microseconds on an H200: of the longest program, or of reading tiles or weights.

    The constants are fitted to measurements of seven matrices from 64 to 8,192 tokens.
    """
    blocks = cdiv(k, BLOCK_K)
    read = rows * k / 4.3e6
    shape = choice.shape
    if shape is None:
        copied = cdiv(rows, 64) * cdiv(tokens, 128) * blocks * 192 * BLOCK_K / 6.1e6
        return 3.3 + max(read, copied)
    work = divide(shape, choice.parts, tokens, rows, processors)
    mean, full = _halves(shape, tokens)
    rounds = cdiv(work.whole, work.programs)
    halves = rounds * mean
    if mean < full and rounds % cdiv(tokens, shape.rows):
        # Full tiles and others alternate. The slowest program has one more of the full ones.
        halves += (full - mean) / 2
    taken = 0.3 * blocks * halves + 3.8 * rounds
    if choice.parts > 1:
        taken += 0.3 * blocks / choice.parts * mean + 5.1 + 1.3 * mean * choice.parts
    return max(read, taken)


def _halves(shape: Shape, tokens: int) -> tuple[float, float]:
    """Return how often 64 tokens are multiplied by 128 features: in the mean tile, and in a full
    one if there is any."""
    sides = shape.columns // SIDE
    tiles = cdiv(tokens, shape.rows)
    mean = cdiv(tokens, HALF) * sides / tiles
    full = shape.halves * shape.consumers if tiles > 1 else mean
    return mean, full
