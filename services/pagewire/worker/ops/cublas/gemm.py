"""GEMMs of cuBLASLt, each by the algorithm that was measured to be the fastest.

torch uses the first algorithm that cuBLAS's heuristic lists. On an H200 it is up to 30 % slower
than the best listed one at 100 tokens, and up to 8 % at 8,000. From 136 to 512 tokens the best
listed one is up to 20 % slower than tiles that the heuristic does not list (`one_wave`). The
difference depends on the shape, so a worker measures at its start. Shapes that were not measured
run with torch's algorithm. See docs/decisions/gemm-algorithms-are-measured.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.worker.ops.cublas.cublaslt import (
    ALIGNMENT,
    Algorithm,
    Shape,
    algorithm_of,
    algorithms,
    library_version,
    multiply,
    with_settings,
)
from pagewire.worker.ops.cublas.one_wave import HEIGHTS, one_wave_tiles
from pagewire.worker.ops.device import multiprocessors

# Writing this many bytes removes weights from the L2 cache. It also keeps the device busy while the
# timed launches are queued.
SCRATCH_BYTES = 256 << 20
# Launches are timed together, on the weights of different layers as in a model. Together they have
# up to this many floating-point operations, about 200 us. There are at most MAX_LAUNCHES.
OPERATIONS = 1.5e11
MAX_LAUNCHES = 4
# The fastest algorithms of this many smaller sizes are tried as well: at some sizes the best listed
# algorithm is 2 to 13 % slower than one that is listed for fewer tokens.
NEIGHBOURS = 3
# Settings that are tried with tiles of one wave: cuBLAS's custom option, which is undocumented, and
# cublasLtClusterShape_t (2, 3 and 5: 1x1, 2x1 and 1x2). They were the fastest on an H200, the only
# GPU that was measured. The library builds a kernel at its first use, so each setting that is tried
# lengthens a worker's start.
SCHEDULES_OF_LOW_TILES = ((9, 2), (9, 5))
SCHEDULES_OF_HIGH_TILES = ((9, 2), (5, 2), (5, 3))
SCHEDULED_CAPABILITY = (9, 0)
# For fewer tokens the heuristic lists tiles of one wave; for more, a whole step is not faster.
ONE_WAVE_TOKENS = range(120, 513)
# This many of the fastest algorithms are timed twice.
FINALISTS = 3
# An algorithm replaces torch's if torch's takes at least this many times as long.
MARGIN = 1.01
# Smaller GEMMs are not measured: they take a few microseconds with any algorithm.
MIN_BYTES = 16 << 20
MIN_OPERATIONS = 4e9

Gemm = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, weight and output

_chosen: dict[Shape, Algorithm] = {}


def gemm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T`, `[tokens, features]`: `out` if given."""
    algorithm = _chosen.get(_shape(x, weight, add=False))
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    if algorithm is None or not _fit(x, weight, out):
        return torch_gemm(x, weight, out)
    return multiply(x, weight, out, algorithm)


def gemm_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Add `x @ weight.T` to `residual [tokens, features]` in place and return `residual`."""
    algorithm = _chosen.get(_shape(x, weight, add=True))
    if algorithm is None or not _fit(x, weight, residual):
        return torch_gemm_add(x, weight, residual)
    return multiply(x, weight, residual, algorithm)


def is_chosen(x: Tensor, weight: Tensor, out: Tensor | None, add: bool) -> bool:
    """Tell whether `gemm`, or `gemm_add` with `add`, has an algorithm chosen for these matrices."""
    given = (x, weight) if out is None else (x, weight, out)
    return _shape(x, weight, add) in _chosen and _fit(*given)


def choose_algorithms(
    weights: Sequence[Tensor], tokens: Sequence[int], add: bool, reference: Gemm | None = None
) -> int:
    """Measure the GEMMs with weights of one shape and keep the fastest algorithm of each.

    Args:
        weights: `[features, k]` each, those of all layers.
        tokens: the numbers of tokens to measure.
        add: whether the results are added to the output.
        reference: consider only algorithms with its bits, and choose one for every size that has
            one, because torch's choice may differ another time.

    Returns:
        The number of sizes for which an algorithm other than torch's was chosen.

    Raises:
        OSError: there is no library.
        RuntimeError: the library returned an error, or the measurement has no memory.
    """
    features, k = weights[0].shape
    shapes = [Shape(count, features, k, weights[0].dtype, add) for count in sorted(tokens)]
    neighbours: deque[Algorithm] = deque(maxlen=NEIGHBOURS)
    changed = 0
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=weights[0].device)
    for shape in shapes:
        if reference is None and not _worth_measuring(shape):
            continue
        order = None if reference is None else ReferenceOrder(shape, weights[0], reference)
        fastest, margin = _fastest(shape, neighbours, weights, scratch, order)
        if fastest is not None:
            neighbours.append(fastest)
            if margin > MARGIN or order is not None:
                _chosen[shape] = fastest
                changed += 1
    return changed


def choices(device: torch.device) -> dict[str, Any]:
    """Return the chosen algorithms of a GPU as JSON can hold them, for `use_choices`.

    Raises:
        OSError: there is no library.
    """
    return {
        "device": torch.cuda.get_device_name(device),
        "library": library_version(),
        "algorithms": [
            [s.tokens, s.features, s.k, str(s.dtype), s.add, bytes(algorithm.chosen).hex()]
            for s, algorithm in _chosen.items()
        ],
    }


def use_choices(recorded: dict[str, Any], device: torch.device) -> bool:
    """Choose the algorithms that `choices` returned in another process, without measuring.

    False, and nothing is chosen, if they are those of another kind of GPU or another library.

    Raises:
        OSError, RuntimeError: as `choose_algorithms`.
    """
    found: dict[Shape, Algorithm] = {}
    here = torch.cuda.get_device_name(device), library_version()
    if (recorded["device"], recorded["library"]) != here:
        return False
    for tokens, features, k, dtype, add, chosen in recorded["algorithms"]:
        shape = Shape(tokens, features, k, getattr(torch, dtype.removeprefix("torch.")), add)
        algorithm = algorithm_of(shape, bytes.fromhex(chosen))
        if algorithm is None:
            return False
        found[shape] = algorithm
    _chosen.update(found)
    return True


class ReferenceOrder:
    """Tells whether a GEMM of one shape has the bits of the reference, in every row.

    Another order of addition changes some of thousands of results.
    """

    def __init__(self, shape: Shape, weight: Tensor, reference: Gemm) -> None:
        """`weight [features, k]` is used; `reference` is that of `choose_algorithms`."""
        self._weight = weight
        self._x = weight.new_empty((shape.tokens, shape.k)).normal_()
        self._held = weight.new_empty((shape.tokens, shape.features)).normal_()
        self._expected = reference(self._x, weight, self._held.clone())

    def holds(self, run: Gemm) -> bool:
        """Whether `run` has the bits of the reference."""
        return torch.equal(run(self._x, self._weight, self._held.clone()), self._expected)


def _usual(shape: Shape) -> Gemm:
    return torch_gemm_add if shape.add else torch_gemm


def _worth_measuring(shape: Shape) -> bool:
    size = shape.features * shape.k
    return size * shape.dtype.itemsize >= MIN_BYTES or _operations(shape) >= MIN_OPERATIONS


def _operations(shape: Shape) -> int:
    return 2 * shape.tokens * shape.features * shape.k


def _fastest(
    shape: Shape,
    neighbours: Iterable[Algorithm],
    weights: Sequence[Tensor],
    scratch: Tensor,
    order: ReferenceOrder | None,
) -> tuple[Algorithm | None, float]:
    """Return the fastest algorithm in `order` or None, and torch's time divided by its time."""
    x = weights[0].new_empty((shape.tokens, shape.k)).normal_(0.0, 0.02)
    out = weights[0].new_zeros((shape.tokens, shape.features))
    launches = max(1, min(MAX_LAUNCHES, int(OPERATIONS / _operations(shape))))
    factors = [weights[launch % len(weights)] for launch in range(launches)]

    def microseconds(run: Gemm) -> float:
        return time_gemm(run, x, factors, out, scratch)

    known = worth_trying(shape, neighbours, x.device)
    if order is not None:
        known = [a for a in known if order.holds(partial(multiply, algorithm=a))]
    if not known:
        return None, 1.0
    usual = _usual(shape)
    runs: list[Gemm] = [partial(multiply, algorithm=algorithm) for algorithm in known]
    for run in (usual, *runs):
        run(x, weights[0], out)  # loads the kernel
    times = [microseconds(run) for run in runs]
    for index in sorted(range(len(known)), key=times.__getitem__)[:FINALISTS]:
        times[index] = min(times[index], microseconds(runs[index]))
    best = min(range(len(known)), key=times.__getitem__)
    limit = min(microseconds(usual), microseconds(usual))
    return known[best], limit / times[best]


def worth_trying(
    shape: Shape, neighbours: Iterable[Algorithm], device: torch.device
) -> list[Algorithm]:
    """Return the algorithms to time: listed ones, those of `neighbours`, and tiles of one wave."""
    known = algorithms(shape, neighbours)
    if known:
        known += _of_one_wave(shape, known[0], device)
    return list({bytes(algorithm.chosen): algorithm for algorithm in known}.values())


def _of_one_wave(shape: Shape, listed: Algorithm, device: torch.device) -> Iterator[Algorithm]:
    """Yield variants of the algorithm `listed` with tiles of one wave."""
    capability = torch.cuda.get_device_capability(device)
    if capability != SCHEDULED_CAPABILITY or shape.tokens not in ONE_WAVE_TOKENS:
        return
    for tile in one_wave_tiles(shape.features, shape.tokens, multiprocessors(device)):
        low = tile.height == min(HEIGHTS)
        for schedule, cluster in SCHEDULES_OF_LOW_TILES if low else SCHEDULES_OF_HIGH_TILES:
            algorithm = with_settings(
                listed,
                tile=tile.number,
                split_k=1,
                reduction=0,
                swizzle=0,
                custom=schedule,
                cluster=cluster,
            )
            if algorithm is not None:
                yield algorithm


def time_gemm(
    run: Gemm, x: Tensor, factors: Sequence[Tensor], out: Tensor, scratch: Tensor
) -> float:
    """Return the mean microseconds of `run` over the weights in `factors`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch.zero_()
    begin.record()
    for weight in factors:
        run(x, weight, out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / len(factors)


def torch_gemm(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


def torch_gemm_add(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return out.addmm_(x, weight.t())


def _shape(x: Tensor, weight: Tensor, add: bool) -> Shape:
    features, k = weight.shape
    return Shape(x.shape[0], features, k, x.dtype, add)


def _fit(*matrices: Tensor) -> bool:
    """Tell whether matrices have the layout of the measured ones."""
    return all(m.is_contiguous() and m.data_ptr() % ALIGNMENT == 0 for m in matrices)
