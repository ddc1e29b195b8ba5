"""The matrix products that cuBLAS computes, each by the algorithm that was measured the fastest.

On an H200 the first one that cuBLAS's heuristics name, which is what torch takes, is up to 30 %
slower than the best of those they name at a hundred tokens, and up to 8 % at eight thousand; from
136 to 512 tokens the best of those is up to 20 % slower than tiles that they do not name
(`one_wave`). How much depends on shape and size
(docs/decisions/gemm-algorithms-are-measured.md), so a worker measures when it starts. What was not
measured takes torch's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pagewire.worker.ops.cublas.cublaslt import (
    ALIGNMENT,
    Algorithm,
    Shape,
    algorithms,
    multiply,
    with_settings,
)
from pagewire.worker.ops.cublas.one_wave import HEIGHTS, one_wave_tiles
from pagewire.worker.ops.device import multiprocessors

log = logging.getLogger(__name__)

# Writing it empties the L2 cache of weights, and keeps the device busy while what is to be timed
# is queued.
SCRATCH_BYTES = 256 << 20
# Launches that are timed together, on weights of different layers as in a model: as many as have
# this many operations, which is some 200 us, but at most so many.
OPERATIONS = 1.5e11
MAX_LAUNCHES = 4
# The fastest of so many numbers of tokens before are tried as well: at some sizes the best that the
# heuristics name is 2 to 13 % behind what they name for smaller ones.
NEIGHBOURS = 3
# What was the fastest with tiles of one wave on an H200, which alone was tried: cuBLAS's custom
# option, whose meaning nobody tells, and cublasLtClusterShape_t (2, 3 and 5: 1x1, 2x1 and 1x2). The
# library makes each kernel when it is first asked for, so a worker's start waits for what is tried.
SCHEDULES_OF_LOW_TILES = ((9, 2), (9, 5))
SCHEDULES_OF_HIGH_TILES = ((9, 2), (5, 2), (5, 3))
SCHEDULED_CAPABILITY = (9, 0)
# With less the heuristics name them, with more whole steps take as long without them.
ONE_WAVE_TOKENS = range(120, 513)
# So many of the algorithms are timed twice.
FINALISTS = 3
# By so much must one be faster than torch's to be taken.
MARGIN = 1.01
# Smaller products are left to torch: they take some microseconds whatever the algorithm.
MIN_BYTES = 16 << 20
MIN_OPERATIONS = 4e9

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, weight and output

_chosen: dict[Shape, Algorithm] = {}


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T`, `[tokens, features]`, in `out` if that is given."""
    algorithm = _chosen.get(_shape(x, weight, add=False))
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    if algorithm is None or not _fit(x, weight, out):
        return torch_product(x, weight, out)
    return multiply(x, weight, out, algorithm)


def product_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Add `x @ weight.T` to `residual [tokens, features]` and return that."""
    algorithm = _chosen.get(_shape(x, weight, add=True))
    if algorithm is None or not _fit(x, weight, residual):
        return torch_add(x, weight, residual)
    return multiply(x, weight, residual, algorithm)


def choose_algorithms(weights: Sequence[Tensor], tokens: Sequence[int], add: bool) -> int:
    """Measure how to multiply by weights of one shape, for each number of tokens.

    Args:
        weights: `[features, k]` each, as many as the model has.
        tokens: rows of the other factor.
        add: whether the products are added to what the output holds.

    Returns:
        For how many numbers of tokens another algorithm than torch's was the fastest.
    """
    features, k = weights[0].shape
    shapes = [Shape(count, features, k, weights[0].dtype, add) for count in sorted(tokens)]
    neighbours: deque[Algorithm] = deque(maxlen=NEIGHBOURS)
    changed = 0
    try:
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=weights[0].device)
        for shape in filter(_worth_measuring, shapes):
            fastest, margin = _fastest(shape, neighbours, weights, scratch)
            if fastest is not None:
                neighbours.append(fastest)
                if margin > MARGIN:
                    _chosen[shape] = fastest
                    changed += 1
    except (OSError, RuntimeError) as error:  # no such library, no memory for the measurement
        log.warning("products keep torch's algorithms: %s", error)
    return changed


def _worth_measuring(shape: Shape) -> bool:
    size = shape.features * shape.k
    return size * shape.dtype.itemsize >= MIN_BYTES or _operations(shape) >= MIN_OPERATIONS


def _operations(shape: Shape) -> int:
    return 2 * shape.tokens * shape.features * shape.k


def _fastest(
    shape: Shape, neighbours: Iterable[Algorithm], weights: Sequence[Tensor], scratch: Tensor
) -> tuple[Algorithm | None, float]:
    """The fastest algorithm, and how many times longer torch's takes; None if none is known."""
    x = weights[0].new_empty((shape.tokens, shape.k)).normal_(0.0, 0.02)
    out = weights[0].new_zeros((shape.tokens, shape.features))
    launches = max(1, min(MAX_LAUNCHES, int(OPERATIONS / _operations(shape))))
    factors = [weights[launch % len(weights)] for launch in range(launches)]

    def microseconds(run: Product) -> float:
        return time_product(run, x, factors, out, scratch)

    known = worth_trying(shape, neighbours, x.device)
    if not known:
        return None, 1.0
    usual: Product = torch_add if shape.add else torch_product
    runs: list[Product] = [partial(multiply, algorithm=algorithm) for algorithm in known]
    for run in (usual, *runs):
        run(x, weights[0], out)  # loads what it launches
    times = [microseconds(run) for run in runs]
    for index in sorted(range(len(known)), key=times.__getitem__)[:FINALISTS]:
        times[index] = min(times[index], microseconds(runs[index]))
    best = min(range(len(known)), key=times.__getitem__)
    limit = min(microseconds(usual), microseconds(usual))
    return known[best], limit / times[best]


def worth_trying(
    shape: Shape, neighbours: Iterable[Algorithm], device: torch.device
) -> list[Algorithm]:
    """What the heuristics name, what neighbours take, and tiles of one wave."""
    known = algorithms(shape, neighbours)
    if known:
        known += _of_one_wave(shape, known[0], device)
    return list({bytes(algorithm.chosen): algorithm for algorithm in known}.values())


def _of_one_wave(shape: Shape, named: Algorithm, device: torch.device) -> Iterator[Algorithm]:
    """`named` with other settings."""
    capability = torch.cuda.get_device_capability(device)
    if capability != SCHEDULED_CAPABILITY or shape.tokens not in ONE_WAVE_TOKENS:
        return
    for tile in one_wave_tiles(shape.features, shape.tokens, multiprocessors(device)):
        low = tile.height == min(HEIGHTS)
        for schedule, cluster in SCHEDULES_OF_LOW_TILES if low else SCHEDULES_OF_HIGH_TILES:
            algorithm = with_settings(
                named,
                tile=tile.number,
                split_k=1,
                reduction=0,
                swizzle=0,
                custom=schedule,
                cluster=cluster,
            )
            if algorithm is not None:
                yield algorithm


def time_product(
    run: Product, x: Tensor, factors: Sequence[Tensor], out: Tensor, scratch: Tensor
) -> float:
    """Microseconds of a product, the mean of one with each of `factors`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch.zero_()
    begin.record()
    for weight in factors:
        run(x, weight, out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / len(factors)


def torch_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


def torch_add(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return out.addmm_(x, weight.t())


def _shape(x: Tensor, weight: Tensor, add: bool) -> Shape:
    features, k = weight.shape
    return Shape(x.shape[0], features, k, x.dtype, add)


def _fit(*matrices: Tensor) -> bool:
    """Whether matrices lie as those did that were measured."""
    return all(m.is_contiguous() and m.data_ptr() % ALIGNMENT == 0 for m in matrices)
