"""The kernels that draw tokens; `reference.sampling` explains the method.

The vocabulary is cut into chunks of ids, and a program reads a run of chunks. With few rows a run
is one chunk, so that a single row fills the device. A program finds the best group of its run in
one pass over the logits. Then it reads the logits of that group again to draw an id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from pagewire.worker.ops.contract import noise
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.adjustments import (
    adjusted_logits,
    adjustment_arguments,
    load_chunk,
)
from pagewire.worker.ops.triton.attention.paged import LOG2_E
from pagewire.worker.ops.triton.sampling_filters import kept_thresholds

# The fastest on an H200 at 1 to 512 rows.
CHUNK = 2048
WARPS = 4
# Programs that run on a multiprocessor at the same time. More programs would only repeat the code
# before the loop.
PROGRAMS_PER_MULTIPROCESSOR = 8

_GROUP = tl.constexpr(noise.GROUP)
_GREEDY_BELOW = tl.constexpr(noise.GREEDY_BELOW)
_SEED_LOW_OFFSET = tl.constexpr(noise.SEED_LOW_OFFSET)
_SEED_HIGH_OFFSET = tl.constexpr(noise.SEED_HIGH_OFFSET)
_MIX_FIRST = tl.constexpr(noise.MIX_FIRST)
_MIX_SECOND = tl.constexpr(noise.MIX_SECOND)
_LARGEST_BELOW_ONE = tl.constexpr(noise.LARGEST_BELOW_ONE)
_SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LOG2_E = tl.constexpr(LOG2_E)
# Adding and subtracting 8 rounds a weight to a multiple of 2^-20. A sum of eight such weights, each
# 1 at most, is exact in float32.
_ROUND = tl.constexpr(8.0)


@triton.jit
def _mix(x):
    """Apply the 32-bit finalizer of MurmurHash3 to uint32."""
    x ^= x >> 16
    x *= _MIX_FIRST
    x ^= x >> 13
    x *= _MIX_SECOND
    return x ^ (x >> 16)


@triton.jit
def _noise_bits(seed, index, numbers):
    """Return `reference.sampling.noise_bits` of one row, as uint32."""
    first = _mix(_mix(seed.to(tl.uint32) + _SEED_LOW_OFFSET) + index.to(tl.uint32))
    second = _mix(((seed >> 32).to(tl.uint32) + _SEED_HIGH_OFFSET) ^ first)
    return _mix(numbers.to(tl.uint32) * (second | 1) + (first + _mix(second)))


@triton.jit
def _log(x, FAST: tl.constexpr):
    """Return the natural logarithm; FAST is the GPU's, to 22 bits, which the interpreter lacks."""
    if FAST:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


@triton.jit
def _gumbel_noise(seed, index, numbers, FAST: tl.constexpr):
    """Return `reference.sampling.gumbel_noise` of one row."""
    upper = (_noise_bits(seed, index, numbers) >> 1).to(tl.float32)
    v = tl.minimum((upper + 0.5) * 0.5**31, _LARGEST_BELOW_ONE)
    series = v * (1.0 + v * (1.0 / 2.0 + v * (1.0 / 3.0 + v * 0.25)))
    exponential = tl.where(v < _SERIES_BELOW, series, -_log(1.0 - v, FAST))
    return -_log(exponential, FAST)


# Values of `index` and `mask_rows` are loaded one by one, so their alignment does not matter:
# compiled once.
@triton.jit(
    do_not_specialize=["run", "mask_bytes"],
    do_not_specialize_on_alignment=["index_ptr", "mask_rows_ptr"],
)
def _draw_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    temperature_ptr,  # [rows], like the next three
    seed_ptr,
    index_ptr,
    min_tokens_ptr,
    stop_ids_ptr,  # [rows, stop ids]
    thresholds_ptr,  # [rows]
    scores_ptr,  # [rows, runs]
    ids_ptr,  # [rows, runs]
    vocabulary,
    run,  # chunks
    kinds_ptr,  # [rows]
    adjusted_ptr,  # [rows, adjusted_stride]
    adjusted_stride,
    mask_rows_ptr,  # [rows]
    masks_ptr,  # [masks, mask_bytes]
    mask_bytes,
    CHUNK: tl.constexpr,
    FILTERED: tl.constexpr,
    ADJUSTED: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the best score of a run of chunks, and the id that is drawn from the best group.

    A program computes one run of one row. The grid is `[runs, rows]`. Scores belong to groups. A
    greedy row has no noise: its score is the largest logit. EXACT: the mass of a group has the same
    bits in any order of addition.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    drawn = temperature >= _GREEDY_BELOW
    inverse = tl.div_rn(1.0, temperature)
    seed, index = tl.load(seed_ptr + row), tl.load(index_ptr + row)
    threshold = -float("inf")
    if FILTERED:
        threshold = tl.load(thresholds_ptr + row)
    source = (
        logits_ptr, stride, vocabulary, index_ptr, min_tokens_ptr, stop_ids_ptr,
        kinds_ptr, adjusted_ptr, adjusted_stride, mask_rows_ptr, masks_ptr, mask_bytes,
    )  # fmt: skip
    start = tl.program_id(0) * run * CHUNK
    lanes = tl.arange(0, CHUNK // _GROUP)
    best = tl.full((CHUNK // _GROUP,), -float("inf"), tl.float32)
    best_groups = start // _GROUP + lanes
    for first in range(start, min(start + run * CHUNK, vocabulary), CHUNK):
        x = load_chunk(source, row, first, CHUNK, ADJUSTED, MASKED)
        if FILTERED:
            x = tl.where(x >= threshold, x, -float("inf"))
        x = tl.reshape(x, (CHUNK // _GROUP, _GROUP))
        score = tl.max(x, axis=1)
        groups = first // _GROUP + lanes
        needed = drawn
        if FILTERED:  # most chunks of a filtered row keep no token and need no noise
            needed = drawn & (tl.max(score) > -float("inf"))
        if needed:
            # Finite, so that a group in which no token is kept has a mass of 0.
            peak = tl.minimum(tl.maximum(score, -_LARGEST), _LARGEST)
            weight = tl.exp2((x - peak[:, None]) * (inverse * _LOG2_E))
            if EXACT:
                weight = (weight + _ROUND) - _ROUND
            mass = tl.sum(weight, axis=1)
            score = peak * inverse + _log(mass, FAST) + _gumbel_noise(seed, index, ~groups, FAST)
        better = score > best  # false for NaN
        best_groups = tl.where(better, groups, best_groups)
        best = tl.where(better, score, best)
    score = tl.max(best)
    group = tl.min(tl.where(best == score, best_groups, 0x7FFFFFFF))
    ids = group * _GROUP + tl.arange(0, _GROUP)
    x = load_chunk(source, row, group * _GROUP, _GROUP, ADJUSTED, MASKED)
    x = tl.where(x >= threshold, x, -float("inf"))  # -inf for NaN as well
    if drawn:
        x = x * inverse + _gumbel_noise(seed, index, ids, FAST)
    out = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(scores_ptr + out, score)
    tl.store(ids_ptr + out, tl.min(tl.where(x == tl.max(x), ids, 0x7FFFFFFF)))


@triton.jit(do_not_specialize=["runs"])
def _choose_kernel(
    scores_ptr,  # [rows, runs]
    ids_ptr,  # [rows, runs]
    tokens_ptr,  # [rows]
    runs,
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the token of the best run of a row; the first of tied runs has the lowest id.

    A program computes one row. The grid is `[rows]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    run = tl.arange(0, RUNS)
    scores = tl.load(scores_ptr + row * runs + run, mask=run < runs, other=-float("inf"))
    _, best = tl.max(scores, axis=0, return_indices=True)
    tl.store(tokens_ptr + row, tl.load(ids_ptr + row * runs + best))


def sample(
    logits: Tensor, state: SamplingState, filtered: bool = True, *, exact: bool = False
) -> Tensor:
    """Implement `SamplingOps.sample`; the rows of `logits` may have any stride.

    With `filtered` False, no kernels of filters and adjustments are launched. Graphs of batches
    without filters capture this variant. With `exact` both variants return the same bits for rows
    without filters.
    """
    rows, vocabulary = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int32)
    if rows == 0:
        return tokens
    pdl = dependent_launch(logits.device)
    launch = {"PDL": pdl, "launch_pdl": pdl, "num_warps": WARPS}
    run, runs = _runs(logits)
    scores = logits.new_empty((rows, runs), dtype=torch.float32)
    ids = torch.empty_like(scores, dtype=torch.int32)
    adjusted = adjusted_logits(logits, state, filtered)
    thresholds = scores  # not read unless `filtered`
    if filtered:
        thresholds = kept_thresholds(logits, state, adjusted)
    _draw_kernel[(runs, rows)](
        logits,
        logits.stride(0),
        state.temperature,
        state.seed,
        state.index,
        state.min_tokens,
        state.stop_token_ids,
        thresholds,
        scores,
        ids,
        vocabulary,
        run,
        CHUNK=CHUNK,
        FILTERED=filtered,
        EXACT=exact,
        FAST=logits.device.type != "cpu",
        **adjustment_arguments(state, adjusted),
        **({"enable_fp_fusion": False} if exact else {}),
        **launch,
    )
    _choose_kernel[(rows,)](
        scores,
        ids,
        tokens,
        runs,
        RUNS=next_power_of_2(cdiv(vocabulary, CHUNK)),
        **launch,
    )
    return tokens


def _runs(logits: Tensor) -> tuple[int, int]:
    """Return the number of chunks in a run, and the number of runs of a row."""
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(logits.device)
    run = min(chunks, max(1, rows * chunks // programs))
    return run, cdiv(chunks, run)
