"""The kernels of top-k, top-p and min-p: a radix search for the smallest logit that is kept.

Nothing is sorted. float32 values map to unsigned integer keys of the same order. Each step of the
search fixes the next `DIGIT_BITS` bits of the pivot's key, from the top. For each candidate of
these bits, a step counts the logits at or above the candidate (top-k) or sums their weights
(top-p). A step is one launch, whose programs first read the sums of the previous step.

Sums over fixed chunks of the vocabulary are added in a fixed order, so the tokens that a row keeps
do not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract import noise
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.adjustments import adjustment_arguments, load_chunk

CHUNK = 4096
WARPS = 4
DIGIT_BITS = 4

_GREEDY_BELOW = tl.constexpr(noise.GREEDY_BELOW)
_DIGIT_BITS = tl.constexpr(DIGIT_BITS)
_DIGITS = tl.constexpr(1 << DIGIT_BITS)


@triton.jit
def _smallest_logit(key):
    """Return the smallest float32 whose key is at least `key`.

    The key of a positive float is its bits with the sign bit set. The key of a negative float is
    the complement of its bits. For keys below the key of -inf, the result is -inf.
    """
    key = tl.maximum(key, 0x007FFFFF)
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row_peak(peaks_ptr, row, chunks, CHUNKS: tl.constexpr):
    """Return the maximum of `peaks [rows, chunks]` over the chunks of a row."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks_ptr + row * chunks + chunk, chunk < chunks, -float("inf")))


@triton.jit
def _step_sums(sums_ptr, step, row, chunks, rows, CHUNKS: tl.constexpr):
    """Return the sum of step `step` of `sums [steps, rows, chunks, digits]` over the chunks."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    offset = ((step * rows + row) * chunks + chunk) * _DIGITS + tl.arange(0, _DIGITS)[None, :]
    return tl.sum(tl.load(sums_ptr + offset, mask=chunk < chunks, other=0.0), axis=0)  # [digits]


@triton.jit
def _narrow(prefix, sums, target, shift):
    """Append the largest digit whose sum reaches the target to the prefix of the pivot."""
    reached = tl.sum((sums >= target).to(tl.int32))
    return prefix | (tl.maximum(reached - 1, 0).to(tl.uint32) << shift)


@triton.jit
def _final_pivot(
    prefixes_ptr, sums_ptr, step, target, row, chunks, rows, steps, CHUNKS: tl.constexpr
):
    """Return the pivot of a search as a logit, from the sums of its last step `step`."""
    sums = _step_sums(sums_ptr, step, row, chunks, rows, CHUNKS)
    prefix = tl.load(prefixes_ptr + step * rows + row).to(tl.uint32, bitcast=True)
    return _smallest_logit(_narrow(prefix, sums, target, 32 - _DIGIT_BITS * steps))


@triton.jit
def _top_p_target(sums_ptr, top_p, row, chunks, rows, steps, CHUNKS: tl.constexpr):
    """Return the mass that top-p keeps.

    The mass after top-k and min-p is the sum of digit 0 in the first step of top-p.
    """
    return top_p * tl.max(_step_sums(sums_ptr, steps, row, chunks, rows, CHUNKS))


@triton.jit
def _kept_floor(
    prefixes_ptr,
    sums_ptr,
    peak,
    top_k,
    min_p_ptr,
    temperature,
    row,
    chunks,
    rows,
    steps,
    CHUNKS: tl.constexpr,
):
    """Return the smallest logit that top-k and min-p keep."""
    floor = peak + tl.log(tl.load(min_p_ptr + row)) * temperature  # log(0) = -inf keeps all
    if top_k > 0:
        target = top_k.to(tl.float32)
        pivot = _final_pivot(
            prefixes_ptr, sums_ptr, steps - 1, target, row, chunks, rows, steps, CHUNKS
        )
        floor = tl.maximum(floor, pivot)
    return floor


# Values of `index` and `mask_rows` are loaded one by one, so their alignment does not matter:
# compiled once.
@triton.jit(
    do_not_specialize=["step", "mask_bytes"],
    do_not_specialize_on_alignment=["index_ptr", "mask_rows_ptr"],
)
def _search_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    temperature_ptr,  # [rows], like the next five
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    index_ptr,
    min_tokens_ptr,
    stop_ids_ptr,  # [rows, stop ids]
    peaks_ptr,  # [rows, chunks]
    prefixes_ptr,  # [2 * steps, rows]
    sums_ptr,  # [2 * steps, rows, chunks, digits]
    step,
    steps,
    vocabulary,
    kinds_ptr,
    adjusted_ptr,
    adjusted_stride,
    mask_rows_ptr,
    masks_ptr,
    mask_bytes,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    ADJUSTED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run one step of the search: fix one digit of the pivot, then sum a chunk for the next digit.

    A program sums one chunk of one row. The grid is `[chunks, rows]`. Steps 0 to `steps - 1` count
    for top-k; step 0 also writes the maximum of each chunk to `peaks`. The next `steps` steps sum
    weights for top-p (MASS). A step writes the digits that are fixed so far to `prefixes`. For each
    possible next digit, it writes the sum over the logits at or above that digit to `sums`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    chunks, rows = tl.num_programs(0), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), vocabulary)
    top_p = tl.load(top_p_ptr + row)
    searched = temperature >= _GREEDY_BELOW
    if MASS:
        searched = searched & (top_p < 1)
    else:
        searched = searched & (top_k > 0)
    peaked: tl.constexpr = FIRST and not MASS

    shift = 32 - _DIGIT_BITS * (step % steps + 1)
    prefix = tl.full((), 0, tl.uint32)
    peak, floor = tl.full((), 0.0, tl.float32), tl.full((), -float("inf"), tl.float32)
    if searched:
        if not FIRST:
            target = top_k.to(tl.float32)
            if MASS:
                target = _top_p_target(sums_ptr, top_p, row, chunks, rows, steps, CHUNKS)
            prefix = tl.load(prefixes_ptr + (step - 1) * rows + row).to(tl.uint32, bitcast=True)
            sums = _step_sums(sums_ptr, step - 1, row, chunks, rows, CHUNKS)
            prefix = _narrow(prefix, sums, target, shift + _DIGIT_BITS)
        if chunk == 0:
            tl.store(prefixes_ptr + step * rows + row, prefix.to(tl.int32, bitcast=True))
        if MASS:
            peak = _row_peak(peaks_ptr, row, chunks, CHUNKS)
            floor = _kept_floor(
                prefixes_ptr,
                sums_ptr,
                peak,
                top_k,
                min_p_ptr,
                temperature,
                row,
                chunks,
                rows,
                steps,
                CHUNKS,
            )
    # Most chunks are below the pivot: their sums are 0, and their logits are not read.
    if peaked:
        needed = True
    else:
        highest = tl.load(peaks_ptr + row * chunks + chunk, searched, -float("inf"))
        needed = searched & (highest >= tl.maximum(floor, _smallest_logit(prefix)))
    source = (
        logits_ptr, stride, vocabulary, index_ptr, min_tokens_ptr, stop_ids_ptr,
        kinds_ptr, adjusted_ptr, adjusted_stride, mask_rows_ptr, masks_ptr, mask_bytes,
    )  # fmt: skip
    out = sums_ptr + ((step * rows + row) * chunks + chunk) * _DIGITS
    if needed:
        x = load_chunk(source, row, chunk * CHUNK, CHUNK, ADJUSTED, MASKED)
        if peaked:
            tl.store(peaks_ptr + row * chunks + chunk, tl.max(x))
        if searched:
            weight = tl.full((CHUNK,), 1.0, tl.float32)
            if MASS:
                inverse = tl.div_rn(1.0, temperature)
                weight = tl.where(x >= floor, tl.exp((x - peak) * inverse), 0.0)
            for digit in tl.static_range(_DIGITS):
                candidate = _smallest_logit(prefix | (tl.full((), digit, tl.uint32) << shift))
                tl.store(out + digit, tl.sum(tl.where(x >= candidate, weight, 0.0)))
    elif searched:
        tl.store(out + tl.arange(0, _DIGITS), tl.zeros((_DIGITS,), tl.float32))


@triton.jit
def _threshold_kernel(
    temperature_ptr,  # [rows], like the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,  # [rows, chunks]
    prefixes_ptr,  # [2 * steps, rows]
    sums_ptr,  # [2 * steps, rows, chunks, digits]
    thresholds_ptr,  # [rows]
    steps,
    vocabulary,
    chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the smallest logit that the filters of a row keep.

    A program computes one row. The grid is `[rows]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, rows = tl.program_id(0), tl.num_programs(0)
    threshold = tl.full((), -float("inf"), tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= _GREEDY_BELOW:
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocabulary)
        top_p = tl.load(top_p_ptr + row)
        peak = _row_peak(peaks_ptr, row, chunks, CHUNKS)
        threshold = _kept_floor(
            prefixes_ptr,
            sums_ptr,
            peak,
            top_k,
            min_p_ptr,
            temperature,
            row,
            chunks,
            rows,
            steps,
            CHUNKS,
        )
        if top_p < 1:
            target = _top_p_target(sums_ptr, top_p, row, chunks, rows, steps, CHUNKS)
            last = 2 * steps - 1
            pivot = _final_pivot(
                prefixes_ptr, sums_ptr, last, target, row, chunks, rows, steps, CHUNKS
            )
            threshold = tl.maximum(threshold, tl.minimum(pivot, peak))
    tl.store(thresholds_ptr + row, threshold)


def kept_thresholds(logits: Tensor, state: SamplingState, adjusted: Tensor | None = None) -> Tensor:
    """Return the smallest logit that the filters of each row keep, `[rows]` float32.

    Equal to `reference.sampling.kept_thresholds`, and -inf for greedy rows.

    Args:
        logits: `[rows, vocabulary]`; the rows may have any stride.
        state: the parameters of the rows.
        adjusted: the result of `adjusted_logits` for this state.
    """
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    steps = noise.KEY_BITS[logits.dtype] // DIGIT_BITS
    peaks = logits.new_empty((rows, chunks), dtype=torch.float32)
    prefixes = logits.new_empty((2 * steps, rows), dtype=torch.int32)
    sums = logits.new_empty((2 * steps, rows, chunks, 1 << DIGIT_BITS), dtype=torch.float32)
    thresholds = logits.new_empty(rows, dtype=torch.float32)
    pdl = dependent_launch(logits.device)
    launch = {
        "CHUNKS": next_power_of_2(chunks),
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": WARPS,
    }
    adjustments = adjustment_arguments(state, adjusted)
    filters = (state.temperature, state.top_k, state.top_p, state.min_p)
    found = (peaks, prefixes, sums)
    for step in range(2 * steps):
        _search_kernel[(chunks, rows)](
            logits,
            logits.stride(0),
            *filters,
            state.index,
            state.min_tokens,
            state.stop_token_ids,
            *found,
            step,
            steps,
            vocabulary,
            CHUNK=CHUNK,
            MASS=step >= steps,
            FIRST=step % steps == 0,
            **adjustments,
            **launch,
        )
    _threshold_kernel[(rows,)](*filters, *found, thresholds, steps, vocabulary, chunks, **launch)
    return thresholds
