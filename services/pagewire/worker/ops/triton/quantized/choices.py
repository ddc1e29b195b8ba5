"""Which kernel multiplies FP8 weights on Hopper: that of `hopper`, with its tiles, or the plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pagewire.worker.ops.integers import cdiv

BLOCK_K = 128  # products that the tensor cores add up
HALF = 64  # tokens of a matrix instruction
SIDE = 128  # weight rows of a consumer
EVEN = 0  # parts: all programs share the rest evenly
MAX_PARTS = 4
# For fewer tokens, the plain kernel has smaller tiles. For more than MAX_PLAIN_TOKENS it is slower.
MIN_TOKENS = 65
MAX_PLAIN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile of a program: each consumer has `halves` times 64 tokens, by 128 features.

    With `beside` the consumers share the tokens, else the features. `stages` tiles of inputs are in
    shared memory. Inputs are copied in boxes of `box` tokens. `group` tiles of tokens run at once,
    so that they read the same weights from the L2 cache. Each consumer begins `skew` clocks after
    the one before, so that one multiplies while another stores.
    """

    consumers: int
    halves: int
    beside: bool
    stages: int
    box: int = 64
    group: int = 8
    skew: int = 0

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
LOW = Shape(2, 1, True, 5)
SHAPES = (TALL, WIDE, SMALL, THREE, LOW)


@dataclass(frozen=True, slots=True)
class Choice:
    """The tiles of a product, and how many programs share each tile of the last round.

    `parts` is 1 if no tile is shared, and EVEN if all programs share the tiles evenly. Without a
    shape, the plain kernel computes the product.
    """

    shape: Shape | None
    parts: int = 1


PLAIN = Choice(None)

# The fastest choices, by weight rows, K, and whether the product computes SiLU times values. The
# keys inside are numbers of tokens: a choice holds from the number before it, or from MIN_TOKENS,
# up to its own number.
TILES: dict[tuple[int, int, bool], dict[int, Choice]] = {}


@cache
def choose(
    tokens: int, rows: int, k: int, processors: int, gated: bool = False, shared: bool = True
) -> Choice:
    """Choose the kernel of a product with a weight `[rows, k]`.

    Without `shared`, no tile is shared, so that the bits do not depend on the number of tokens.
    """
    found = _measured(tokens, rows, k, gated)
    if found is not None and (shared or found.parts == 1):
        return found
    return min(
        _candidates(tokens, rows, k, processors, gated, shared),
        key=lambda choice: estimate(choice, tokens, rows, k, processors),
    )


def _measured(tokens: int, rows: int, k: int, gated: bool) -> Choice | None:
    if tokens < MIN_TOKENS:
        return None
    buckets = TILES.get((rows, k, gated), {})
    return next((buckets[limit] for limit in sorted(buckets) if tokens <= limit), None)


def _candidates(
    tokens: int, rows: int, k: int, processors: int, gated: bool, shared: bool
) -> Iterator[Choice]:
    if tokens <= MAX_PLAIN_TOKENS and not gated:
        yield PLAIN
        if tokens < MIN_TOKENS:
            return
    for shape in SHAPES:
        yield Choice(shape)
        if shared:
            for parts in (2, 3, 4, EVEN):
                if is_shareable(shape, parts, tokens, rows, k, processors):
                    yield Choice(shape, parts)


@dataclass(frozen=True, slots=True)
class Work:
    """How tiles are divided: `whole` tiles first, then `sharers` programs share the rest."""

    tiles: int
    whole: int
    sharers: int
    programs: int


def divide(shape: Shape, parts: int, tokens: int, rows: int, processors: int) -> Work:
    """Divide the tiles of a product among the programs."""
    tiles = cdiv(tokens, shape.rows) * cdiv(rows, shape.columns)
    if parts == 1:
        return Work(tiles, tiles, 1, min(tiles, processors))
    rest = tiles % processors
    sharers = processors if parts == EVEN else rest * parts
    whole = tiles - rest
    return Work(tiles, whole, sharers, processors if whole else sharers)


def is_shareable(shape: Shape, parts: int, tokens: int, rows: int, k: int, processors: int) -> bool:
    """Tell whether `parts` programs can share each tile of the last round."""
    work = divide(shape, parts, tokens, rows, processors)
    rest, blocks = work.tiles - work.whole, k // BLOCK_K
    if parts == 1:
        return True
    # All programs run at once, since they wait for each other.
    if rest == 0 or work.sharers > processors or work.sharers > rest * blocks:
        return False
    at_least = rest * blocks // work.sharers
    most = parts if parts != EVEN else cdiv(blocks - 1, at_least) + 1
    return most <= MAX_PARTS


def estimate(choice: Choice, tokens: int, rows: int, k: int, processors: int) -> float:
    """Estimate microseconds on an H200: of the longest program, or of reading tiles or weights."""
    blocks = cdiv(k, BLOCK_K)
    read = rows * k / 4.3e6
    shape = choice.shape
    if shape is None:
        programs = cdiv(rows, 64) * cdiv(tokens, 128)
        copied = programs * blocks * 192 * BLOCK_K / 8e6
        return 2.5 + max(read, copied, blocks * 0.33 * max(1.0, programs / processors / 1.8))
    work = divide(shape, choice.parts, tokens, rows, processors)
    copied = work.tiles * blocks * (shape.rows + shape.columns) * BLOCK_K / 8e6
    mean, full = _halves(shape, tokens)
    rounds = cdiv(work.whole, work.programs)
    halves = rounds * mean
    if mean < full and rounds % cdiv(tokens, shape.rows):
        # Full tiles and others alternate. The slowest program has one more of the full ones.
        halves += (full - mean) / 2
    taken = blocks * (0.15 * halves + 0.05 * rounds) + 0.8 * rounds
    if choice.parts != 1:
        length = (work.tiles - work.whole) * blocks / work.sharers
        taken += length * (0.15 * mean + 0.05) + 1.5 + 0.5 * mean
        if choice.parts == EVEN:
            taken += 0.5 + 0.5 * mean  # most programs have parts of two tiles
    return 3.0 + max(read, copied, taken)


def _halves(shape: Shape, tokens: int) -> tuple[float, float]:
    """Return how often 64 tokens are multiplied by 128 features: in the mean tile, and in a full
    one if there is any."""
    sides = shape.columns // SIDE
    tiles = cdiv(tokens, shape.rows)
    mean = cdiv(tokens, HALF) * sides / tiles
    full = shape.halves * shape.consumers if tiles > 1 else mean
    return mean, full
