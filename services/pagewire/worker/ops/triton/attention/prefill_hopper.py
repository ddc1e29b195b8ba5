"""Prefill attention for Hopper, written in Gluon: a loader and two consumers in each program.

A work item is 128 query rows of one KV head, as in `attention_prefill`. The loader, one warp,
copies the item's queries and its KV tiles to shared memory by TMA, a page of 16 positions at a
time. Each consumer is a warp group of four warps with 64 of the rows. It issues the scores of the
next KV tile and the values of the current one, and computes the softmax of the next while the
tensor cores work. The consumers take turns on the tensor cores by themselves.

Programs are persistent, one on each multiprocessor, and take items from a counter, heaviest first
within a chunk. The loader hands each item over through shared memory.

KV tiles begin at multiples of 128 positions, and every row folds its tiles from left to right.
A row's result therefore has the same bits whichever chunk, tile or batch it was computed in.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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

from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.triton.attention.paged import LOG2_E

HEAD_DIM = gl.constexpr(128)
ROWS = gl.constexpr(128)  # of queries in an item
HALF = gl.constexpr(64)  # of them, one consumer's
TILE = gl.constexpr(128)  # KV positions of a step
PAGE = gl.constexpr(16)  # KV positions of a copy; divides every block size
STAGES = gl.constexpr(2)  # KV tiles in shared memory
FIELDS = gl.constexpr(8)  # int32 values that describe an item
CHUNKS = gl.constexpr(256)  # what a call may have, the tokens after the last chunk counted as one
# 65,536 registers for three warp groups, one of which is the loader's.
CONSUMER_REGISTERS = gl.constexpr(224)
LOADER_REGISTERS = gl.constexpr(56)
# Below this many query rows in a chunk, smaller tiles keep more multiprocessors busy.
MIN_ROWS = 1024


@cache
def is_hopper(device: torch.device) -> bool:
    """Tell whether the kernel runs on the device: its instructions are those of sm_90 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def is_supported(q: Tensor, k_cache: Tensor, chunks: int, max_query_length: int) -> bool:
    """Tell whether `prefill` computes this call, and is faster than the plain kernel."""
    _, query_heads, head_dim = q.shape
    group = query_heads // k_cache.shape[1]
    return (
        is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == q.dtype
        and head_dim == HEAD_DIM.value
        and HALF.value % group == 0
        and chunks < CHUNKS.value
        and group * max_query_length > MIN_ROWS
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
    pdl: bool = True,
) -> None:
    """Compute `prefill_attention` into `out`, where `is_supported`.

    Two calls on one device must not run at the same time: they would share the counter of items.
    """
    tokens, query_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    chunks = slots.shape[0]
    group = query_heads // kv_heads
    pdl = pdl and dependent_launch(q.device)
    launch = {"launch_pdl": True} if pdl else {}
    bits = 8 * q.element_size()
    page = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)
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
    """Items taken and programs done, `[2]` int32: zeros before and after each call.

    Raises:
        RuntimeError: the first call is inside the capture of a graph, whose memory they would be.
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
    tables_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    counters_ptr,
    scale_log2,
    tokens,
    chunks,
    table_stride,
    cache_lines,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = k_pages.dtype
    tiled: gl.constexpr = k_pages.layout
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
    fence_async_shared()
    if PDL:  # by every program: whoever waits for this kernel waits for the one before it, too
        gdc_wait()
        gdc_launch_dependents()
    # Literals: constants of a tuple that has a name would become values.
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
                counters_ptr, tokens, chunks, table_stride, cache_lines,
                q_smem, k_smem, v_smem, item_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, v_partial,
                KV_HEADS, GROUP, BLOCK_SIZE,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
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
    counters_ptr,
    tokens,
    chunks,
    table_stride,
    cache_lines,
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
    v_partial,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Take items until there are none; load the queries and the KV tiles of each."""
    TOKENS: gl.constexpr = ROWS // GROUP
    of_chunks: gl.constexpr = gl.BlockedLayout([CHUNKS // 32], [32], [1], [0])
    of_fields: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
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
    item = _taken(_take(counters_ptr))
    while item < all_tiles * KV_HEADS:
        head = item % KV_HEADS
        # Late tiles of a chunk see the most positions: they start first, the light ones fill up.
        tile = all_tiles - 1 - item // KV_HEADS
        chunk = gl.sum((tiles <= tile).to(gl.int32), 0)
        tile_in_chunk = tile - gl.max(gl.where(index < chunk, tiles, 0), 0)
        begin = gl.load(starts_ptr + chunk)
        end = gl.load(starts_ptr + chunk + 1, mask=chunk < chunks, other=tokens)
        length = gl.load(lengths_ptr + chunk, mask=chunk < chunks, other=0)
        token_begin = begin + tile_in_chunk * TOKENS
        ticket = 0
        if length == 0:
            ticket = _take(counters_ptr)
            _store_zeros(out_ptr, token_begin, end, head, KV_HEADS, GROUP)
        else:
            table_ptr = tables_ptr + gl.load(slots_ptr + chunk) * table_stride
            first_position = length - end + token_begin
            last_position = gl.minimum(first_position + TOKENS, length) - 1
            kv_tiles = last_position // TILE + 1
            diagonal = (first_position + 1) // TILE  # tiles that every row sees whole
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
            for kv_tile in range(kv_tiles):
                # Late, so that programs with little work left take items first, but in time.
                if kv_tile == kv_tiles - 1:
                    ticket = _take(counters_ptr)
                first = kv_tile * TILE
                lines = ()
                for page in gl.static_range(TILE // PAGE):
                    at = first + page * PAGE
                    block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
                    line = (block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE
                    # The copy fills pages behind the cache with zeros.
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
                stage, phase = _next(stage, phase)
        item = _taken(ticket)

    # An item without tiles is the end.
    mbarrier.wait(q_empty, (served & 1) ^ 1)
    item_smem.store(gl.zeros([FIELDS], gl.int32, layout=of_fields))
    debug_barrier()
    mbarrier.arrive(q_full)
    # Nothing is left to take once all programs are here: the last one clears the counters.
    if gl.atomic_add(counters_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _next(stage, phase):
    """Return the stage after `stage`, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _take(counters_ptr):
    """Begin to take an item. Only `_taken` waits for the counter; one warp calls this."""
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
def _taken(ticket):
    """Return the item of `_take` to all lanes."""
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
    """Copy the pages that begin at `lines` of the cache to a KV tile; `full` counts the bytes."""
    mbarrier.expect(full, TILE * HEAD_DIM * 2)
    for page in gl.static_range(TILE // PAGE):
        tma.async_copy_global_to_shared(
            pages, [lines[page], 0], full, tile_smem.slice(page * PAGE, PAGE)
        )


@gluon.jit
def _clear_lines(v_smem, stage, first):
    """Zero the last page of a tile from position `first` on.

    Values behind the end of a sequence may be NaN, and a weight of zero does not undo that. The
    tile lies in shared memory as two halves of the head's dimensions, 128 bytes a line each.
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
def _store_zeros(out_ptr, token_begin, end, head, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Write the zeros that padding has for a result."""
    two_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, two_rows))
    for first in range(0, ROWS, 2):
        row = first + gl.arange(0, 2, layout=gl.SliceLayout(1, two_rows))
        token = token_begin + row // GROUP
        line = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        zeros = gl.zeros([2, HEAD_DIM], out_ptr.dtype.element_ty, layout=two_rows)
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
    """Attend from one half of each item's rows to its KV tiles."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    # Every thread has all fields.
    of_fields: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [4]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [FIELDS]
    )
    # A thread has eight columns of a row: a store of 16 bytes.
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
        # A finite stand-in for minus infinity: differences of two of them are 0, not NaN.
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
        stage, phase = _next(stage, phase)

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
    """Return the weights of `scores`, the decay of what was before, and the new sums."""
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
    """Add the tile in `stage`, whose weights are known, and compute the weights of the next."""
    next_stage, next_phase = _next(stage, phase)
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
