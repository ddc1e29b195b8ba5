"""Decode attention over the paged KV cache: one query token a row.

Every program has an equal share of a batch's work (`attention_shares.py`), which is planned once
for all layers. A row and KV head that lies within one share is written straight to the output; one
that is cut leaves a piece in each share, and pieces are merged (`attention_merge.py`). Rows that
share a prefix have units for the rest only, and the pieces of their shared ranges join the merge.

Where the kernel in front is attention too, of the batch's prefill chunks or of the rows' shared
prefixes, decode attention needs nothing of it and runs beside it: one computes while the other
reads. That kernel waits for the queries before it lets anybody start, so they are there. Whoever
waits for decode attention must find both done: it waits for its neighbour when its own work is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.worker.ops.contract.shared_ranges import MAX_RANGES, SharedRanges
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.decode_kernel import decode_kernel
from pagewire.worker.ops.triton.attention.merge import merge_config, merge_pieces
from pagewire.worker.ops.triton.attention.paged import LOG2_E, check_layout
from pagewire.worker.ops.triton.attention.shared import Pieces, attend_shared_ranges
from pagewire.worker.ops.triton.attention.shares import DecodePlan, plan_shares
from pagewire.worker.protocol.steps.limits import RUN

REGISTERS = 65536  # of a multiprocessor, since Volta


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention is cut and scheduled.

    `tile` KV positions a step of the loop, `share` KV positions at least a program (shorter
    shares cost more to merge than they save), `programs` a multiprocessor.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    share: int
    pdl: bool = True

    @property
    def least_share(self) -> int:
        """The same in tiles."""
        return max(1, self.share // self.tile)

    @property
    def registers(self) -> int:
        """As many as a thread may have so that a multiprocessor holds its programs; 8 apart."""
        each = REGISTERS // (32 * self.warps * self.programs)
        return min(255, each - each % 8)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    shared: SharedRanges | None = None,
    plan: DecodePlan | None = None,
    beside_prefill: bool = False,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attend from one new token of each sequence to all of its cached tokens.

    Args:
        q: `[rows, query_heads, head_dim]`, contiguous.
        k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, contiguous.
        block_tables: `[slots, max_blocks]` int32.
        slots: `[rows]` int32, the block table row of each query row.
        lengths: `[rows]` int32, cached tokens of each row, the current one included. A row of
            length 0 gives zeros, a negative length leaves the row of `out` as it is.
        scale: multiplies the scores, usually `head_dim ** -0.5`; positive.
        shared: KV ranges that rows have in common; none when None.
        plan: what `plan_decode` returned for these lengths and ranges; planned here when None.
        beside_prefill: what was launched just before is `prefill_attention` with the same queries.
        out: like `q`, takes the result; a new tensor when None.
        config: the schedule; chosen by dtype, head size and rows when None.

    Returns:
        `[rows, query_heads, head_dim]` in the dtype of `q`: `out` if it was given.

    Raises:
        ValueError: the tensors' layout is not the one described.
    """
    check_layout(q, k_cache, v_cache)
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    config = config or decode_config(q.dtype, head_dim, group, rows)
    programs = multiprocessors(q.device) * config.programs
    merge = merge_config(rows, kv_heads, group, programs)
    if rows == 1:
        programs = merge.programs(programs, kv_heads)
    plan = plan or _plan(lengths, shared, kv_heads, config)
    pdl = config.pdl and dependent_launch(q.device)
    common = {
        "HEAD_DIM": head_dim,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "TILE": config.tile,
        "PLANNED": plan is not None,
        "RANGES": 0 if shared is None else MAX_RANGES,
        "PDL": pdl,
    } | ({"launch_pdl": True} if pdl else {})

    out = torch.empty_like(q) if out is None else out
    if shared is None:  # not read
        ranges = Pieces(out, out)
        shared_lengths = counts = lengths
    else:
        ranges = attend_shared_ranges(q, k_cache, v_cache, block_tables, shared, scale)
        shared_lengths, counts = shared.lengths, shared.counts
    if plan is None:  # not read
        plan = DecodePlan(lengths, lengths, lengths, lengths, lengths)
    pieces = q.new_empty((programs, 2, group, head_dim), dtype=torch.float32)
    sums = q.new_empty((programs, 2, group), dtype=torch.float32)
    decode_kernel[(programs,)](
        out,
        pieces,
        sums,
        ranges.out,
        ranges.lse,
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        lengths,
        shared_lengths,
        counts,
        plan.rows,
        plan.units,
        plan.begins,
        scale * LOG2_E,
        config.least_share,
        int(beside_prefill or shared is not None),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        RUN=RUN,
        BLOCK_N=max(8, next_power_of_2(group)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        **common,
    )
    merge_pieces(
        out,
        pieces,
        sums,
        ranges,
        lengths,
        shared_lengths,
        counts,
        plan,
        config.least_share,
        merge,
        **common,
    )
    return out


def decode_config(dtype: torch.dtype, head_dim: int, group: int, rows: int) -> DecodeConfig:
    """Choose a schedule, as times of kernels and of whole decode steps found them on an H200
    (`benchmarks/kernels/attention.py --sweep`, docs/decisions/decode-attention-shares.md).

    Shares are equal, so a multiprocessor must hold just as many programs as it is given. Programs
    of one warp wait for no other; they are short of registers where heads or groups are large. Few
    rows have few units: small tiles and short shares keep more programs busy.
    """
    if dtype == torch.float32:
        return DecodeConfig(tile=32, warps=4, stages=2, programs=2, share=64)
    if head_dim > 128:
        return DecodeConfig(tile=32, warps=4, stages=3, programs=2, share=64)
    if group > 16:
        return DecodeConfig(
            tile=32 if head_dim > 64 else 64, warps=4, stages=3, programs=4, share=64
        )
    tile = 16 if rows <= 64 and head_dim > 64 else 32
    share = 32 if rows <= 2 else 64
    return DecodeConfig(tile=tile, warps=1, stages=2, programs=8, share=share)


def plan_decode(
    lengths: Tensor,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: SharedRanges | None = None,
) -> DecodePlan | None:
    """Cut a batch's decode attention into shares, which are the same in every layer.

    Args:
        lengths: `[rows]` int32, as in `decode_attention`.
        query_heads, kv_heads, head_dim: of a layer.
        dtype: of queries, keys and values.
        shared: as in `decode_attention`.

    Returns:
        The plan, valid as long as the lengths; None for a single row, which needs none.
    """
    config = decode_config(dtype, head_dim, query_heads // kv_heads, len(lengths))
    return _plan(lengths, shared, kv_heads, config)


def _plan(
    lengths: Tensor, shared: SharedRanges | None, kv_heads: int, config: DecodeConfig
) -> DecodePlan | None:
    if len(lengths) == 1:
        return None
    programs = multiprocessors(lengths.device) * config.programs
    return plan_shares(lengths, shared, kv_heads, config.tile, programs, config.least_share)
