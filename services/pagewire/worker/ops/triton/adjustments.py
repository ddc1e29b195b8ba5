"""Biases, bans, penalties and masks of logits.

One kernel writes the adjusted logits of the rows that have biases or penalties. Later kernels read
these logits (`load_chunk`) and need no registers for adjustments. They read all other rows from the
logits of the model and ban stop tokens themselves. They read the masks of constrained rows, too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.ops.contract import sampling as contract
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2

CHUNK = 4096
WARPS = 8
# Programs of a chunk, each with a run of rows. Most rows have no adjustments, so few programs are
# faster than one for each row.
RUNS = 16
# Rows begin at multiples of this many values, where loads of 16 bytes are possible.
_ALIGNMENT = 16

_STOP_IDS = tl.constexpr(MAX_STOP_IDS)
_BIASES = tl.constexpr(MAX_BIASES)
_BIAS_LANES = tl.constexpr(next_power_of_2(MAX_BIASES))
_NO_TOKEN = tl.constexpr(contract.NO_TOKEN)
_BIASED = tl.constexpr(contract.BIASED)
_PENALIZED = tl.constexpr(contract.PENALIZED)
_MAX_COUNTED = tl.constexpr(contract.MAX_COUNTED)


@triton.jit
def load_chunk(
    source, row, first, COUNT: tl.constexpr, ADJUSTED: tl.constexpr, MASKED: tl.constexpr
):
    """Load the adjusted logits of COUNT ids of one row, as float32; -inf past the vocabulary.

    Tokens that the mask of the row excludes have -inf, too. `first`, the first id, and COUNT are
    multiples of 8: a byte of a mask has the bits of 8 tokens.

    `source` is a tuple of kernel arguments: `logits_ptr, stride, vocabulary, index_ptr,
    min_tokens_ptr, stop_ids_ptr, kinds_ptr, adjusted_ptr, adjusted_stride, mask_rows_ptr,
    masks_ptr, mask_bytes`.
    """
    ids = first + tl.arange(0, COUNT)
    logits_ptr, stride, vocabulary, index_ptr, min_tokens_ptr, stop_ids_ptr = source[:6]
    kinds_ptr, adjusted_ptr, adjusted_stride, mask_rows_ptr, masks_ptr, mask_bytes = source[6:]
    if ADJUSTED and tl.load(kinds_ptr + row) != 0:
        adjusted = adjusted_ptr + row.to(tl.int64) * adjusted_stride + ids
        x = tl.load(adjusted, mask=ids < vocabulary, other=-float("inf"))
    else:
        logits = logits_ptr + row.to(tl.int64) * stride + ids
        x = tl.load(logits, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
        x = _ban_stop_tokens(x, row, ids, index_ptr, min_tokens_ptr, stop_ids_ptr)
    if MASKED:
        mask = tl.load(mask_rows_ptr + row).to(tl.int64)
        at = first // 8 + tl.arange(0, COUNT // 8)
        known = (at * 8 < vocabulary) & (mask >= 0)
        bits = tl.load(masks_ptr + mask * mask_bytes + at, mask=known, other=0xFF).to(tl.int32)
        allowed = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
        x = tl.where(tl.reshape(allowed, (COUNT,)) != 0, x, -float("inf"))
    return x


@triton.jit
def _ban_stop_tokens(x, row, ids, index_ptr, min_tokens_ptr, stop_ids_ptr):
    """Compute `reference.sampling.ban_stop_tokens` for a chunk of one row."""
    if tl.load(index_ptr + row) < tl.load(min_tokens_ptr + row):
        for i in tl.static_range(_STOP_IDS):
            stop = tl.load(stop_ids_ptr + row * _STOP_IDS + i)
            x = tl.where(ids == stop, -float("inf"), x)
    return x


@triton.jit
def _add_biases(x, ids, first, end, slot, bias_ids_ptr, biases_ptr):
    """Add the biases of a slot to a chunk. Their ids ascend: those in the chunk are adjacent."""
    bias_ids_ptr += slot * _BIASES
    lane = tl.arange(0, _BIAS_LANES)
    biased = tl.load(bias_ids_ptr + lane, mask=lane < _BIASES, other=_NO_TOKEN)
    for i in range(tl.sum((biased < first).to(tl.int32)), tl.sum((biased < end).to(tl.int32))):
        bias = tl.load(biases_ptr + slot * _BIASES + i)
        x = tl.where(ids == tl.load(bias_ids_ptr + i), x + bias, x)
    return x


@triton.jit
def _penalize(x, seen, penalties_ptr):
    """Compute `reference.sampling.penalized` for a chunk of one row."""
    repetition = tl.load(penalties_ptr)
    frequency, presence = tl.load(penalties_ptr + 1), tl.load(penalties_ptr + 2)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    count = seen & _MAX_COUNTED
    penalty = frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    return tl.where(seen != 0, repeated, x) - penalty


# Values of `index` and `slots` are loaded one by one, so their alignment does not matter: compiled
# once.
@triton.jit(
    do_not_specialize=["rows", "run"],
    do_not_specialize_on_alignment=["index_ptr", "slots_ptr"],
)
def _adjust_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    index_ptr,  # [rows]
    min_tokens_ptr,  # [rows]
    stop_ids_ptr,  # [rows, stop ids]
    kinds_ptr,  # [rows]
    slots_ptr,  # [rows]
    counts_ptr,  # [slots, counts_stride]
    counts_stride,
    penalties_ptr,  # [slots, 3]
    bias_ids_ptr,  # [slots, biases]
    biases_ptr,  # [slots, biases]
    adjusted_ptr,  # [rows, adjusted_stride]
    adjusted_stride,
    rows,
    run,  # rows
    vocabulary,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the adjusted logits of rows that have biases or penalties.

    A program computes one chunk of ids for a run of rows. The grid is `[chunks, runs]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0) * CHUNK
    ids = first + tl.arange(0, CHUNK)
    known = ids < vocabulary
    for i in range(run):
        row = tl.program_id(1).to(tl.int64) * run + i
        kinds = tl.load(kinds_ptr + row, mask=row < rows, other=0)
        if kinds != 0:
            slot = tl.load(slots_ptr + row)
            x = tl.load(logits_ptr + row * stride + ids, mask=known).to(tl.float32)
            if (kinds & _BIASED) != 0:
                x = _add_biases(x, ids, first, first + CHUNK, slot, bias_ids_ptr, biases_ptr)
            x = _ban_stop_tokens(x, row, ids, index_ptr, min_tokens_ptr, stop_ids_ptr)
            if (kinds & _PENALIZED) != 0:
                counts = counts_ptr + slot.to(tl.int64) * counts_stride + ids
                seen = tl.load(counts, mask=known, other=0).to(tl.int32)
                x = _penalize(x, seen, penalties_ptr + slot * 3)
            tl.store(adjusted_ptr + row * adjusted_stride + ids, x, mask=known)


def adjusted_logits(logits: Tensor, state: SamplingState, adjusted: bool = True) -> Tensor | None:
    """Return the logits after biases, bans and penalties, for rows with biases or penalties.

    Masks are not applied: `load_chunk` does that.

    Returns:
        `[rows, vocabulary or more]` float32, in which other rows are undefined; None if `state`
        has no adjustments or `adjusted` is False.
    """
    given = state.adjustments
    if given is None or not adjusted:
        return None
    rows, vocabulary = logits.shape
    columns = vocabulary + -vocabulary % _ALIGNMENT
    out = logits.new_empty((rows, columns), dtype=torch.float32)
    pdl = dependent_launch(logits.device)
    run = cdiv(rows, RUNS)
    _adjust_kernel[(cdiv(vocabulary, CHUNK), cdiv(rows, run))](
        logits,
        logits.stride(0),
        state.index,
        state.min_tokens,
        state.stop_token_ids,
        given.kinds,
        given.slots,
        given.token_counts,
        given.token_counts.stride(0),
        given.penalties,
        given.bias_ids,
        given.biases,
        out,
        columns,
        rows,
        run,
        vocabulary,
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=WARPS,
    )
    return out


def adjustment_arguments(state: SamplingState, adjusted: Tensor | None) -> dict[str, Any]:
    """Return the last kernel arguments of `load_chunk`, for a result of `adjusted_logits`."""
    given, masks, not_read = state.adjustments, state.masks, state.temperature
    arguments = {
        "kinds_ptr": not_read,
        "adjusted_ptr": not_read,
        "adjusted_stride": 0,
        "mask_rows_ptr": not_read,
        "masks_ptr": not_read,
        "mask_bytes": 0,
        "ADJUSTED": False,
        "MASKED": False,
    }
    if given is not None and adjusted is not None:
        arguments |= {
            "kinds_ptr": given.kinds,
            "adjusted_ptr": adjusted,
            "adjusted_stride": adjusted.stride(0),
            "ADJUSTED": True,
        }
    if masks is not None:
        arguments |= {
            "mask_rows_ptr": masks.rows,
            "masks_ptr": masks.words.view(torch.uint8),
            "mask_bytes": 4 * masks.words.shape[1],
            "MASKED": True,
        }
    return arguments
