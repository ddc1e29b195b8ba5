"""Prefill attention for Hopper, written in Gluon: a loader and two consumers in each program.

A work item is 128 query rows of one KV head, as in `prefill`. The loader is one warp. It copies the
queries and the KV tiles of an item to shared memory by TMA, a page of 16 positions at a time. A
consumer is a warp group of four warps with 64 of the rows. It issues the products for the scores of
the next KV tile and for the values of the current one. While the tensor cores work, it computes the
softmax of the next tile. The two consumers alternate on the tensor cores without synchronization.
The scheme is that of FlashAttention-3 (Shah et al., 2024). A cache in FP8 has its own loader, see
`prefill_hopper_fp8`.

Programs are persistent, one on each multiprocessor. They take items from a counter. Within a chunk,
items with the most work come first. The loader describes each item to the consumers in shared
memory.

KV tiles begin at multiples of 128 positions, and every row adds its tiles from left to right. So
the result of a row has the same bits in every chunk, tile and batch.
See docs/decisions/prefill-attention-hopper.md.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.triton.attention import prefill_hopper_fp8 as fp8_tiles
from pagewire.worker.ops.triton.attention.hopper_tiles import HEAD_DIM, STAGES, TILE, advanced
from pagewire.worker.ops.triton.attention.paged import LOG2_E

ROWS = gl.constexpr(128)  # query rows of an item
HALF = gl.constexpr(64)  # query rows of a consumer
PAGE = gl.constexpr(16)  # KV positions of a copy; divides every block size
FIELDS = gl.constexpr(8)  # int32 values that describe an item
CHUNKS = gl.constexpr(256)  # maximum; the tokens after the last chunk count as one
# Registers of a thread. A multiprocessor has 65,536 for two consumers and the loader's warp group.
CONSUMER_REGISTERS = gl.constexpr(224)
LOADER_REGISTERS = gl.constexpr(56)
# With at most this many query rows in a chunk, the smaller tiles of the plain kernel keep more
# multiprocessors busy.
MIN_ROWS = 1024
MIN_ROWS_FP8 = 128  # the plain kernel converts an FP8 cache for each of its smaller tiles


def is_supported(q: Tensor, k_cache: Tensor, chunks: int, max_query_length: int) -> bool:
    """Tell whether `prefill` can compute this call and is faster than the plain kernel."""
    _, query_heads, head_dim = q.shape
    group = query_heads // k_cache.shape[1]
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    return (
        is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and (fp8 or k_cache.dtype == q.dtype)
        and head_dim == HEAD_DIM.value
        and HALF.value % group == 0
        and chunks < CHUNKS.value
        and group * max_query_length > (MIN_ROWS_FP8 if fp8 else MIN_ROWS)
    )


def prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    scales: KVScales | None = None,
    pdl: bool = True,
) -> None:
    """Compute `prefill_attention` into `out`, for calls that are supported (`is_supported`).

    Two calls on one device must not run at the same time: they would share the counter of items.
    """
    tokens, query_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    chunks = slots.shape[0]
    group = query_heads // kv_heads
    pdl = pdl and dependent_launch(q.device)
    launch = {"launch_pdl": True} if pdl else {}
    page = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    k_pages: TensorDescriptor | Tensor = k_cache
    v_pages: TensorDescriptor | Tensor = v_cache
    if scales is None:
        k_pages, v_pages = (
            TensorDescriptor.from_tensor(kv.view(-1, head_dim), [PAGE.value, head_dim], page)
            for kv in (k_cache, v_cache)
        )
    queries = TensorDescriptor.from_tensor(q, [HALF.value // group, group, head_dim], rows)
    most_items = (tokens // (ROWS.value // group) + chunks + 1) * kv_heads
    prefill_hopper_kernel[(min(multiprocessors(q.device), most_items),)](
        queries,
        k_pages,
        v_pages,
        out,
        block_tables,
        slots,
        query_starts,
        lengths,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        _counters(q.device),
        scale * LOG2_E,
        tokens,
        chunks,
        block_tables.stride(0),
        num_blocks * kv_heads * block_size,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of items taken and programs done, `[2]` int32.

    Both are zero before and after each call of the kernel.

    Raises:
        RuntimeError: the first call is captured in a graph. The graph's memory would hold the
            counters.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "prefill attention is captured before its first call: call it once before the capture"
        )
    return torch.zeros(2, dtype=torch.int32, device=device)


@gluon.jit(do_not_specialize=["tokens", "chunks", "cache_lines"])
def prefill_hopper_kernel(
    q_rows,  # descriptor of [tokens, kv_heads * group, head_dim]
    k_pages,  # descriptor of [num_blocks * kv_heads * block_size, head_dim]
    v_pages,
    out_ptr,  # [tokens, kv_heads * group, head_dim]
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [chunks]
    starts_ptr,  # [chunks + 1]
    lengths_ptr,  # [chunks]
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], or None if keys and values have none
    v_scales_ptr,
    counters_ptr,  # [2]
    scale_log2,
    tokens,
    chunks,
    table_stride,
    cache_lines,  # vectors of head_dim in the cache
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attend from the query rows of work items to the KV positions that they see.

    A program takes items until none is left. The grid is `[multiprocessors]`, or fewer if there are
    fewer items.
    """
    dtype: gl.constexpr = q_rows.dtype
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], tiled)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], tiled)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], tiled)
    item_smem = gl.allocate_shared_memory(gl.int32, [FIELDS], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_partial = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(v_partial, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    FP8: gl.constexpr = k_scales_ptr is not None
    loader_warps: gl.constexpr = fp8_tiles.LOADER_WARPS if FP8 else 1
    consumer_registers: gl.constexpr = fp8_tiles.CONSUMER_REGISTERS if FP8 else CONSUMER_REGISTERS
    loader_registers: gl.constexpr = fp8_tiles.LOADER_REGISTERS if FP8 else LOADER_REGISTERS
    if FP8:
        raw: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
        raw_smem = gl.allocate_shared_memory(gl.float8e4nv, [2, TILE, HEAD_DIM], raw)
        scales_smem = gl.allocate_shared_memory(gl.float32, [2, TILE], flat)
    else:  # not read
        raw_smem = k_smem
        scales_smem = item_smem
    fence_async_shared()
    if PDL:  # every program waits, so that the next kernel's wait covers earlier kernels, too
        gdc_wait()
        gdc_launch_dependents()
    # Literal tuples: in a tuple that has a name, Gluon would turn constants into values.
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, scale_log2, q_smem, k_smem, v_smem, item_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, GROUP,
            )),
            (_consume, (
                1, out_ptr, scale_log2, q_smem, k_smem, v_smem, item_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, GROUP,
            )),
            (_load, (
                q_rows, k_pages, v_pages, out_ptr, tables_ptr, slots_ptr, starts_ptr, lengths_ptr,
                k_scales_ptr, v_scales_ptr, counters_ptr, tokens, chunks, table_stride, cache_lines,
                q_smem, k_smem, v_smem, item_smem, raw_smem, scales_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, v_partial,
                KV_HEADS, GROUP, BLOCK_SIZE, loader_warps,
            )),
        ],
        [4, loader_warps],
        [consumer_registers, loader_registers],
    )  # fmt: skip


@gluon.jit
def _load(
    q_rows,
    k_pages,
    v_pages,
    out_ptr,
    tables_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    k_scales_ptr,
    v_scales_ptr,
    counters_ptr,
    tokens,
    chunks,
    table_stride,
    cache_lines,
    q_smem,
    k_smem,
    v_smem,
    item_smem,
    raw_smem,
    scales_smem,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    v_partial,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Take items until none is left; load the queries and the KV tiles of each item.

    Keys and values in FP8 have scales, and are copied to `raw_smem` first.
    """
    TOKENS: gl.constexpr = ROWS // GROUP
    FP8: gl.constexpr = k_scales_ptr is not None
    of_chunks: gl.constexpr = gl.BlockedLayout([CHUNKS // 32], [32], [WARPS], [0])
    of_fields: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [WARPS], [0])
    # The tokens after the last chunk are chunk number `chunks`.
    index = gl.arange(0, CHUNKS, layout=of_chunks)
    starts = gl.load(starts_ptr + index, mask=index <= chunks, other=tokens)
    ends = gl.load(starts_ptr + index + 1, mask=index < chunks, other=tokens)
    tiles = gl.associative_scan((ends - starts + TOKENS - 1) // TOKENS, 0, _add)  # up to each chunk
    all_tiles = gl.max(tiles, 0)
    field = gl.arange(0, FIELDS, layout=of_fields)

    served = 0
    partial_tiles = 0
    stage = 0
    phase = 1
    item = _taken(_take(counters_ptr, WARPS), WARPS)
    while item < all_tiles * KV_HEADS:
        head = item % KV_HEADS
        # The last tiles of a chunk see the most positions, so they start first.
        tile = all_tiles - 1 - item // KV_HEADS
        chunk = gl.sum((tiles <= tile).to(gl.int32), 0)
        tile_in_chunk = tile - gl.max(gl.where(index < chunk, tiles, 0), 0)
        begin = gl.load(starts_ptr + chunk)
        end = gl.load(starts_ptr + chunk + 1, mask=chunk < chunks, other=tokens)
        length = gl.load(lengths_ptr + chunk, mask=chunk < chunks, other=0)
        token_begin = begin + tile_in_chunk * TOKENS
        ticket = 0
        if length == 0:
            ticket = _take(counters_ptr, WARPS)
            _store_zeros(out_ptr, token_begin, end, head, KV_HEADS, GROUP, WARPS)
        else:
            table_ptr = tables_ptr + gl.load(slots_ptr + chunk) * table_stride
            first_position = length - end + token_begin
            last_position = gl.minimum(first_position + TOKENS, length) - 1
            kv_tiles = last_position // TILE + 1
            diagonal = (first_position + 1) // TILE  # KV tiles that every row sees in full
            if FP8:
                line, seen = fp8_tiles.lines_of_tile(
                    table_ptr, 0, head, length, KV_HEADS, BLOCK_SIZE
                )
                fp8_tiles.copy_lines(k_pages, line, seen, raw_smem.index(0))
                async_copy.commit_group()
                fp8_tiles.copy_lines(v_pages, line, seen, raw_smem.index(1))
                async_copy.commit_group()
            mbarrier.wait(q_empty, (served & 1) ^ 1)
            served += 1
            fields = gl.where(field == 0, kv_tiles, 0)
            fields = gl.where(field == 1, diagonal, fields)
            fields = gl.where(field == 2, token_begin, fields)
            fields = gl.where(field == 3, end, fields)
            fields = gl.where(field == 4, first_position, fields)
            fields = gl.where(field == 5, head, fields)
            item_smem.store(fields)
            debug_barrier()
            mbarrier.expect(q_full, ROWS * HEAD_DIM * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    q_rows,
                    [token_begin + half * (HALF // GROUP), head * GROUP, 0],
                    q_full,
                    q_smem.index(half)._reinterpret(
                        q_rows.dtype, [HALF // GROUP, GROUP, HEAD_DIM], q_rows.layout
                    ),
                )
            if FP8:
                ticket, stage, phase = fp8_tiles.load_fp8_tiles(
                    kv_tiles, table_ptr, head, length, stage, phase,
                    k_pages, v_pages, k_scales_ptr, v_scales_ptr, counters_ptr,
                    k_smem, v_smem, raw_smem, scales_smem, k_full, k_empty, v_full, v_empty,
                    KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
            else:
                for kv_tile in range(kv_tiles):
                    # Take the next item during the last KV tile: late, so that programs with less
                    # work take items first, but early enough to hide the latency.
                    if kv_tile == kv_tiles - 1:
                        ticket = _take(counters_ptr, WARPS)
                    first = kv_tile * TILE
                    lines = ()
                    for page in gl.static_range(TILE // PAGE):
                        at = first + page * PAGE
                        block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
                        line = (block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE
                        # TMA fills pages past the end of the cache with zeros.
                        lines = lines + (gl.where(at < length, line, cache_lines),)  # type: ignore[assignment]  # noqa: RUF005
                    mbarrier.wait(k_empty.index(stage), phase)
                    _copy_pages(k_pages, lines, k_full.index(stage), k_smem.index(stage))
                    mbarrier.wait(v_empty.index(stage), phase)
                    left = length - first
                    if (left < TILE) & (left % PAGE != 0):
                        _copy_pages(v_pages, lines, v_partial, v_smem.index(stage))
                        mbarrier.wait(v_partial, partial_tiles & 1)
                        partial_tiles += 1
                        _clear_lines(v_smem, stage, left)
                        mbarrier.arrive(v_full.index(stage))
                    else:
                        _copy_pages(v_pages, lines, v_full.index(stage), v_smem.index(stage))
                    stage, phase = advanced(stage, phase)
        item = _taken(ticket, WARPS)

    # An item without KV tiles tells the consumers to end.
    mbarrier.wait(q_empty, (served & 1) ^ 1)
    item_smem.store(gl.zeros([FIELDS], gl.int32, layout=of_fields))
    debug_barrier()
    mbarrier.arrive(q_full)
    # When the last program arrives here, no item is left to take, so it clears the counters.
    if gl.atomic_add(counters_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _take(counters_ptr, WARPS: gl.constexpr):
    """Begin to take an item. `_taken` waits for the result."""
    if WARPS > 1:
        return gl.atomic_add(counters_ptr, 1)
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }",
        "=r,l",
        [counters_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _taken(ticket, WARPS: gl.constexpr):
    """Return the item of a `_take` in all lanes."""
    if WARPS > 1:
        return ticket
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;",
        "=r,r",
        [ticket],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _copy_pages(pages, lines, full, tile_smem):
    """Copy the pages at `lines` of the cache to a KV tile; the barrier `full` counts the bytes."""
    mbarrier.expect(full, TILE * HEAD_DIM * 2)
    for page in gl.static_range(TILE // PAGE):
        tma.async_copy_global_to_shared(
            pages, [lines[page], 0], full, tile_smem.slice(page * PAGE, PAGE)
        )


@gluon.jit
def _clear_lines(v_smem, stage, first):
    """Zero the last page of a tile from position `first` on.

    Values past the end of a sequence may be NaN, and NaN times a weight of zero is NaN. In shared
    memory the tile is stored as two halves of `head_dim`, with lines of 128 bytes each.
    """
    half_line: gl.constexpr = HEAD_DIM // 2
    of_line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = v_smem._reinterpret(v_smem.dtype, [STAGES * 2 * TILE, half_line], flat)
    for at in range(first, (first + PAGE - 1) // PAGE * PAGE):
        for half in gl.static_range(2):
            line = lines.index((stage * 2 + half) * TILE + at)
            line.store(gl.zeros([half_line], v_smem.dtype, layout=of_line))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _store_zeros(
    out_ptr,
    token_begin,
    end,
    head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write zeros for the tokens of a padding chunk."""
    some_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, some_rows))
    for first in range(0, ROWS, 2 * WARPS):
        row = first + gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, some_rows))
        token = token_begin + row // GROUP
        line = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        zeros = gl.zeros([2 * WARPS, HEAD_DIM], out_ptr.dtype.element_ty, layout=some_rows)
        at = (line * HEAD_DIM)[:, None] + dim[None, :]
        gl.store(out_ptr + at, zeros, mask=(token < end)[:, None])


@gluon.jit
def _consume(
    half: gl.constexpr,
    out_ptr,
    scale_log2,
    q_smem,
    k_smem,
    v_smem,
    item_smem,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Attend from one half of the rows of each item to its KV tiles."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    # Every thread holds all fields.
    of_fields: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [4]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [FIELDS]
    )
    # A thread holds eight columns of a row, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, HEAD_DIM],
    )
    dtype: gl.constexpr = k_smem.dtype
    field = gl.arange(0, FIELDS, layout=of_fields)
    q = q_smem.index(half)
    served = 0
    stage = 0
    phase = 0
    mbarrier.wait(q_full, 0)
    fields = item_smem.load(of_fields)
    kv_tiles = _field(fields, field, 0)
    while kv_tiles > 0:
        diagonal = _field(fields, field, 1)
        token_begin = _field(fields, field, 2)
        token_end = _field(fields, field, 3)
        first_position = _field(fields, field, 4)
        head = _field(fields, field, 5)
        row = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_scores))
        column = gl.arange(0, TILE, layout=gl.SliceLayout(0, of_scores))
        position = first_position + row // GROUP
        # Used instead of minus infinity: the difference of two such values is 0, not NaN.
        highest = gl.full([HALF], -1.0e30, gl.float32, layout=gl.SliceLayout(1, of_scores))
        norm = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, of_scores))
        out = gl.zeros([HALF, HEAD_DIM], gl.float32, layout=of_out)
        no_scores = gl.zeros([HALF, TILE], gl.float32, layout=of_scores)

        mbarrier.wait(k_full.index(stage), phase)
        keys = k_smem.index(stage).permute((1, 0))
        scores = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage))
        scores = gl.where(column[None, :] <= position[:, None], scores, float("-inf"))
        weights, _, highest, norm = _softmax(scores, highest, norm, scale_log2)
        weights = gl.convert_layout(weights.to(dtype), of_weights)
        for kv_tile in range(1, diagonal):
            out, weights, highest, norm, stage, phase = _step(
                out, weights, highest, norm, stage, phase,
                q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                no_scores, position, kv_tile * TILE + column, scale_log2, False,
            )  # fmt: skip
        for kv_tile in range(gl.maximum(diagonal, 1), kv_tiles):
            out, weights, highest, norm, stage, phase = _step(
                out, weights, highest, norm, stage, phase,
                q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                no_scores, position, kv_tile * TILE + column, scale_log2, True,
            )  # fmt: skip
        mbarrier.arrive(q_empty)
        mbarrier.wait(v_full.index(stage), phase)
        out = warpgroup_mma(weights, v_smem.index(stage), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = advanced(stage, phase)

        out = out * gl.convert_layout(1.0 / norm, gl.SliceLayout(1, of_out))[:, None]
        result = gl.convert_layout(out.to(out_ptr.dtype.element_ty), of_store)
        row = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_store))
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, of_store))
        token = token_begin + row // GROUP
        line = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        at = (line * HEAD_DIM)[:, None] + dim[None, :]
        gl.store(out_ptr + at, result, mask=(token < token_end)[:, None])

        served += 1
        mbarrier.wait(q_full, served & 1)
        fields = item_smem.load(of_fields)
        kv_tiles = _field(fields, field, 0)


@gluon.jit
def _field(fields, field, wanted: gl.constexpr):
    return gl.sum(gl.where(field == wanted, fields, 0), 0)


@gluon.jit
def _softmax(scores, highest, norm, scale_log2):
    """Return the weights of `scores`, the decay of earlier sums, and the new maximum and norm."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    decay = gl.exp2(highest - new_highest)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    return weights, decay, new_highest, norm * decay + gl.sum(weights, 1)


@gluon.jit
def _step(
    out,
    weights,
    highest,
    norm,
    stage,
    phase,
    q,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    no_scores,
    position,
    at,
    scale_log2,
    MASKED: gl.constexpr,
):
    """Add the values of the tile in `stage`, and compute the weights of the next tile."""
    next_stage, next_phase = advanced(stage, phase)
    mbarrier.wait(k_full.index(next_stage), next_phase)
    keys = k_smem.index(next_stage).permute((1, 0))
    scores = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    out = warpgroup_mma(weights, v_smem.index(stage), out, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(next_stage))
    if MASKED:
        scores = gl.where(at[None, :] <= position[:, None], scores, float("-inf"))
    next_weights, decay, highest, norm = _softmax(scores, highest, norm, scale_log2)
    out = warpgroup_mma_wait(0, deps=(out,))
    mbarrier.arrive(v_empty.index(stage))
    out = out * gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout))[:, None]
    next_weights = gl.convert_layout(next_weights.to(weights.dtype), weights.type.layout)
    return out, next_weights, highest, norm, next_stage, next_phase
