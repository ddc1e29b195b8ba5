"""Shared-prefix (cascade) decode attention: keys and values of a prefix are read once for all rows.

A work item is a range of KV positions and the rows that share it (`SharedPrefixItems`). The query
heads of these rows fill a tile of the tensor cores, as in prefill. The result of an item is a piece
of each row: a float32 output that is normalized over the range, and its log-sum-exp. The merge of
decode attention merges them with the piece of each row's own positions. This is the two-level
scheme of "cascade inference" (Ye et al., 2024, FlashInfer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.shared_prefix import (
    ITEM_FIELDS,
    MAX_RANGES,
    PrefixLimits,
    SharedPrefixItems,
)
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import LOWEST, score_scales
from pagewire.worker.ops.triton.attention.prefill import (
    PrefillConfig,
    attend_tiles,
    prefill_config,
)

# Programs that run on a multiprocessor at the same time with these tiles.
PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Pieces:
    """Attention of rows over parts of their KV, before the merge; float32."""

    out: Tensor  # [rows, MAX_RANGES + 1, query_heads, head_dim]
    # [rows, MAX_RANGES + 1, query_heads], log-sum-exp in base 2 of the scaled scores
    lse: Tensor


def shared_prefix_limits(dtype: torch.dtype, head_dim: int, group: int) -> PrefixLimits:
    """Implement `AttentionOps.shared_prefix_limits`."""
    return PrefixLimits(members=max_rows_per_item(dtype, head_dim, group))


def max_rows_per_item(dtype: torch.dtype, head_dim: int, group: int) -> int:
    """Return the maximum number of rows in an item; `group` is query heads per KV head."""
    return max(1, _config(dtype, head_dim).rows // group)


def _config(dtype: torch.dtype, head_dim: int, *, fp8: bool = False) -> PrefillConfig:
    """Return the tiles of a long prefill.

    With few rows, the time of an item is the time to read its KV, with any tile. The rows of a tile
    do not depend on `fp8`, so that items have the same limits.
    """
    config = prefill_config(dtype, head_dim, rows=2**16)
    if not fp8 or dtype == torch.float32:
        return config
    if head_dim > 128:
        return replace(config, tile=16)
    return replace(config, registers=None)


def attend_shared_prefixes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    shared: SharedPrefixItems,
    scale: float,
    *,
    scales: KVScales | None = None,
    soft_cap: float | None = None,
) -> Pieces:
    """Return the pieces of all ranges; the arguments are those of `decode_attention`."""
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    config = _config(q.dtype, head_dim, fp8=scales is not None)
    scale_log2, cap_scale = score_scales(scale, soft_cap)
    pdl = dependent_launch(q.device)
    launch = {"launch_pdl": True} if pdl else {}
    pieces = Pieces(
        out=q.new_empty((rows, MAX_RANGES + 1, query_heads, head_dim), dtype=torch.float32),
        lse=q.new_empty((rows, MAX_RANGES + 1, query_heads), dtype=torch.float32),
    )
    _shared_prefix_kernel[(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q.device),)](
        pieces.out,
        pieces.lse,
        q,
        k_cache,
        v_cache,
        block_tables,
        shared.num_items,
        shared.items,
        shared.entries,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        scale_log2,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=max(config.rows, next_power_of_2(group)),
        TILE=config.tile,
        RANGES=MAX_RANGES,
        FIELDS=ITEM_FIELDS,
        CAP_SCALE=cap_scale,
        FP8=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        **launch,
    )
    return pieces


@triton.jit
def _shared_prefix_kernel(
    pieces_ptr,  # [rows, RANGES + 1, kv_heads * group, head_dim]
    sums_ptr,  # [rows, RANGES + 1, kv_heads * group], log-sum-exps
    q_ptr,  # [rows, kv_heads * group, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim]
    v_ptr,
    tables_ptr,  # [slots, table_stride]
    num_items_ptr,
    items_ptr,  # [items, FIELDS]
    entries_ptr,
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    scale_log2,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RANGES: tl.constexpr,
    FIELDS: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from the rows of an item to its range.

    The number of programs is fixed, so the grid depends on the device only. A program computes each
    n-th pair of item and KV head: the query heads of that KV head for all rows.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    MEMBERS: tl.constexpr = ROWS // GROUP
    query = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    total = tl.load(num_items_ptr) * KV_HEADS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item_ptr = items_ptr + work // KV_HEADS * FIELDS
        head = work % KV_HEADS
        table_ptr = tables_ptr + tl.load(item_ptr) * table_stride
        begin = tl.load(item_ptr + 1)
        end = tl.load(item_ptr + 2)
        first = tl.load(item_ptr + 3)
        members = tl.load(item_ptr + 4)
        ordinal = tl.load(item_ptr + 5)

        member = query // GROUP
        present = (member < members) & (query < MEMBERS * GROUP)
        row = tl.load(entries_ptr + first + member, mask=present, other=0)
        query_head = head * GROUP + query % GROUP
        at = (row * HEADS + query_head)[:, None] * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptr + at, mask=present[:, None], other=0.0)

        highest = tl.full([ROWS], LOWEST, tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        out, highest, norm = attend_tiles(
            out, highest, norm,
            q, k_ptr, v_ptr, table_ptr, head, query, scale_log2, end,
            begin // TILE, end // TILE, k_scales_ptr, v_scales_ptr,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, False, 0, CAP_SCALE, FP8, PRECISION,
        )  # fmt: skip

        piece = (row * (RANGES + 1) + ordinal) * HEADS + query_head
        to = piece[:, None] * HEAD_DIM + dim[None, :]
        tl.store(pieces_ptr + to, out / norm[:, None], mask=present[:, None])
        tl.store(sums_ptr + piece, highest + tl.log2(norm), mask=present)
