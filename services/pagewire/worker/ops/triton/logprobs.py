"""The kernels of log probabilities.

The vocabulary is cut into chunks. One kernel reduces each chunk, a second one merges the chunks of
each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2

CHUNK = 2048
WARPS = 4


@triton.jit
def _top_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    tokens_ptr,  # [rows]
    peaks_ptr,  # [rows, chunks]
    masses_ptr,  # [rows, chunks]
    larger_ptr,  # [rows, chunks]
    values_ptr,  # [rows, chunks, TOP]
    ids_ptr,  # [rows, chunks, TOP]
    vocabulary,
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the maximum of a chunk, its sum of `exp(x - maximum)`, and its TOP largest logits.

    Also count the logits of the chunk that are larger than the logit of the row's token. A program
    reduces one chunk of one row. The grid is `[chunks, rows]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(0) + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = logits_ptr + row.to(tl.int64) * stride + ids
    x = tl.load(logits, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
    peak = tl.max(x)
    tl.store(peaks_ptr + at, peak)
    tl.store(masses_ptr + at, tl.sum(tl.exp(x - peak)))
    token = tl.load(tokens_ptr + row)
    own = tl.load(logits_ptr + row.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(larger_ptr + at, tl.sum((x > own).to(tl.int32)))
    for i in range(TOP):
        value, position = tl.max(x, axis=0, return_indices=True)
        tl.store(values_ptr + at * TOP + i, value)
        tl.store(ids_ptr + at * TOP + i, chunk * CHUNK + position)
        x = tl.where(ids == chunk * CHUNK + position, -float("inf"), x)


@triton.jit
def _logprobs_kernel(
    logits_ptr,
    stride,
    tokens_ptr,  # [rows]
    peaks_ptr,  # [rows, chunks]
    masses_ptr,  # [rows, chunks]
    larger_ptr,  # [rows, chunks]
    values_ptr,  # [rows, chunks, TOP]
    ids_ptr,  # [rows, chunks, TOP]
    chosen_ptr,  # [rows]
    ranks_ptr,  # [rows]
    top_ids_ptr,  # [rows, TOP]
    top_ptr,  # [rows, TOP]
    chunks,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the chunks of a row: normalize, and choose the TOP largest candidates.

    A program computes one row. The grid is `[rows]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    masses = tl.load(masses_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks)
    normalizer = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak)))
    token = tl.load(tokens_ptr + row)
    logit = tl.load(logits_ptr + row.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(chosen_ptr + row, logit - normalizer)
    larger = tl.load(larger_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    tl.store(ranks_ptr + row, tl.sum(larger) + 1)
    if TOP > 0:
        candidate = tl.arange(0, CANDIDATES)
        mask = candidate < chunks * TOP
        at = row * chunks * TOP + candidate
        values = tl.load(values_ptr + at, mask=mask, other=-float("inf"))
        for i in range(TOP):
            value, best = tl.max(values, axis=0, return_indices=True)
            tl.store(top_ptr + row * TOP + i, value - normalizer)
            # If a value is NaN, the maximum may be at a padding candidate, which has no id.
            best_id = tl.load(
                ids_ptr + row * chunks * TOP + best, mask=best < chunks * TOP, other=0
            )
            tl.store(top_ids_ptr + row * TOP + i, best_id)
            values = tl.where(candidate == best, -float("inf"), values)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement `SamplingOps.logprobs`; the rows of `logits` may have any stride."""
    if not 0 <= k <= MAX_LOGPROBS:
        raise ValueError(f"k is {k}: choose 0 to {MAX_LOGPROBS} log probabilities a token")
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    chosen = logits.new_empty(rows, dtype=torch.float32)
    top = logits.new_empty((rows, k), dtype=torch.float32)
    top_ids = torch.empty_like(top, dtype=torch.int32)
    ranks = torch.empty_like(chosen, dtype=torch.int32)
    peaks = logits.new_empty((rows, chunks), dtype=torch.float32)
    masses = torch.empty_like(peaks)
    larger = torch.empty_like(peaks, dtype=torch.int32)
    values = logits.new_empty((rows, chunks, k), dtype=torch.float32)
    ids = torch.empty_like(values, dtype=torch.int32)
    if rows == 0:
        return chosen, top_ids, top, ranks
    partial = (logits, logits.stride(0), tokens)
    pdl = dependent_launch(logits.device)
    launch = {"PDL": pdl, "launch_pdl": pdl, "num_warps": WARPS}
    _top_kernel[(chunks, rows)](
        *partial,
        peaks,
        masses,
        larger,
        values,
        ids,
        vocabulary,
        CHUNK=CHUNK,
        TOP=k,
        **launch,
    )
    _logprobs_kernel[(rows,)](
        *partial,
        peaks,
        masses,
        larger,
        values,
        ids,
        chosen,
        ranks,
        top_ids,
        top,
        chunks,
        CHUNKS=next_power_of_2(chunks),
        CANDIDATES=next_power_of_2(chunks * max(k, 1)),
        TOP=k,
        **launch,
    )
    return chosen, top_ids, top, ranks
