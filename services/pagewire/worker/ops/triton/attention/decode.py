"""Decode attention over the paged KV cache: one query token for each row.

Every program computes an equal share of the batch (`shares`), planned once for all layers. A
segment (one KV head of one row) within one share is written to the output. A segment that is cut
has a piece in each of its shares, and the pieces are merged (`merge`). For rows with a shared
prefix, shares cover only the positions after it, and the pieces of the prefix (`shared_prefix`) are
merged as well.

The preceding kernel may be attention as well: of the prefill chunks of the batch, or of shared
prefixes. Decode attention does not need its result and runs at the same time, since one kernel
mostly computes while the other mostly reads. The queries are complete, because the preceding kernel
waits for them before it lets decode attention start. A kernel that waits for decode attention must
find both complete, so decode attention waits for the preceding kernel at its end.
See docs/decisions/attention-overlap.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN, KVScales
from pagewire.worker.ops.contract.shared_prefix import MAX_RANGES, SharedPrefixItems
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.decode_kernel import decode_kernel
from pagewire.worker.ops.triton.attention.merge import MergeConfig, merge_config, merge_pieces
from pagewire.worker.ops.triton.attention.paged import check_layout, score_scales
from pagewire.worker.ops.triton.attention.shared_prefix import Pieces, attend_shared_prefixes
from pagewire.worker.ops.triton.attention.shares import DecodePlan, plan_shares

REGISTERS = 65536  # of a multiprocessor, since Volta
LONG_ROWS = 8  # most rows of batches whose kernels have a loop of long shares


@dataclass(frozen=True, slots=True)
class LongShares:
    """The loop of long shares, which replaces the usual one where equal shares are long.

    Its compiled kernel has both loops and chooses on the device, since lengths are not known at
    launch.
    """

    tile: int
    stages: int
    share: int  # the least positions of an equal share


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiles and launch options of decode attention."""

    tile: int  # KV positions of a step of the loop
    warps: int
    stages: int
    programs: int  # on each multiprocessor
    share: int  # smallest share in KV positions; shorter ones cost more to merge than they save
    pdl: bool = True
    long: LongShares | None = None
    merge: MergeConfig | None = None  # None: chosen by rows

    @property
    def min_share(self) -> int:
        """`share` in tiles."""
        return max(1, self.share // self.tile)

    @property
    def registers(self) -> int:
        """The most registers of a thread with which all programs run at once, a multiple of 8."""
        each = REGISTERS // (32 * self.warps * self.programs)
        return min(255, each - each % 8)


# Of few rows of heads of 128 with an FP8 cache, the fastest of the tried loops on an H200.
LONG_FP8 = LongShares(tile=32, stages=2, share=192)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    scales: KVScales | None = None,
    shared: SharedPrefixItems | None = None,
    plan: DecodePlan | None = None,
    beside_prefill: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Implement `AttentionOps.decode_attention`.

    With a window, each row reads all its positions itself, shared or not. `config` sets tiles and
    launch options; None chooses them by dtype, head size and rows.
    """
    check_layout(q, k_cache, v_cache, scales)
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    fp8 = scales is not None
    config = config or decode_config(q.dtype, head_dim, group, rows, fp8)
    shared = None if window is not None else shared
    programs = multiprocessors(q.device) * config.programs
    merge = config.merge or merge_config(rows, kv_heads, group, programs)
    if rows == 1:
        programs = merge.programs(programs, kv_heads)
    plan = plan or _plan(lengths, shared, kv_heads, config, window)
    scale_log2, cap_scale = score_scales(scale, soft_cap)
    # Halves of smaller heads are too short for an operand of the tensor cores.
    paired = fp8 and q.dtype != torch.float32 and head_dim >= 32
    long = _long_shares(config, shared, window)
    pdl = config.pdl and dependent_launch(q.device)
    common = {
        "HEAD_DIM": head_dim,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "TILE": config.tile,
        "LONG_TILE": 0 if long is None else long.tile,
        "LONG_SHARE": 0 if long is None else long.share,
        "PLANNED": plan is not None,
        "RANGES": 0 if shared is None else MAX_RANGES,
        "WINDOW": window or 0,
        "RUN": RUN,
        "PDL": pdl,
    } | ({"launch_pdl": True} if pdl else {})

    out = torch.empty_like(q) if out is None else out
    if shared is None:  # the kernels do not read these
        ranges = Pieces(out, out)
        shared_lengths = counts = lengths
    else:
        ranges = attend_shared_prefixes(
            q, k_cache, v_cache, block_tables, shared, scale, scales=scales, soft_cap=soft_cap
        )
        shared_lengths, counts = shared.lengths, shared.counts
    if plan is None:  # the kernels do not read it
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
        k_cache.view(torch.int16) if paired else k_cache,
        v_cache.view(torch.int16) if paired else v_cache,
        block_tables,
        slots,
        lengths,
        shared_lengths,
        counts,
        plan.rows,
        plan.units,
        plan.begins,
        plan.shares,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        sinks,
        scale_log2,
        config.min_share,
        int(beside_prefill or shared is not None),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        CAP_SCALE=cap_scale,
        FP8=fp8,
        STAGES=config.stages,
        LONG_STAGES=config.stages if long is None else long.stages,
        LEAN=long is not None and paired and soft_cap is None,
        PAIRED=paired,
        INTERPRETED=q.device.type == "cpu",
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
        config.min_share,
        merge,
        **common,
    )
    return out


def decode_config(
    dtype: torch.dtype, head_dim: int, group: int, rows: int, fp8: bool = False
) -> DecodeConfig:
    """Choose tiles and launch options, the fastest on an H200.

    They were chosen by `benchmarks/kernels/attention.py --sweep` and the time of whole decode steps
    (docs/decisions/decode-attention-shares.md). Shares are equal, so all programs of a
    multiprocessor must run at once. Programs of one warp need no synchronization, but have too few
    registers for large heads or groups. A batch of few rows has few units: small tiles and short
    shares keep more programs busy.
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
    long, merge = None, None
    if fp8 and rows <= LONG_ROWS and head_dim == 128 and group <= 8:
        long = LONG_FP8
        merge = MergeConfig(step=256, heads=1, parts=4) if rows == 1 else None
    return DecodeConfig(
        tile=tile, warps=1, stages=2, programs=8, share=share, long=long, merge=merge
    )


def plan_decode(
    lengths: Tensor,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: SharedPrefixItems | None = None,
    window: int | None = None,
    fp8: bool = False,
) -> DecodePlan | None:
    """Implement `AttentionOps.plan_decode`; a single row needs no plan."""
    config = decode_config(dtype, head_dim, query_heads // kv_heads, len(lengths), fp8)
    shared = None if window is not None else shared
    return _plan(lengths, shared, kv_heads, config, window)


def _plan(
    lengths: Tensor,
    shared: SharedPrefixItems | None,
    kv_heads: int,
    config: DecodeConfig,
    window: int | None,
) -> DecodePlan | None:
    if len(lengths) == 1:
        return None
    programs = multiprocessors(lengths.device) * config.programs
    long = _long_shares(config, shared, window)
    return plan_shares(
        lengths,
        shared,
        kv_heads,
        config.tile,
        programs,
        config.min_share,
        window=window,
        long_tile=0 if long is None else long.tile,
        long_share=0 if long is None else long.share,
    )


def _long_shares(
    config: DecodeConfig, shared: SharedPrefixItems | None, window: int | None
) -> LongShares | None:
    return config.long if shared is None and window is None else None
