"""KV tiles of Hopper's prefill attention that are cached in FP8.

Eight warps copy lines of the cache to shared memory unchanged. From there they convert the lines to
the tile that the consumers multiply by: numbers times scales, rounded to the type of the queries.
So the results have the same bits as with a plain cache of the rounded values. A tile of keys or
values is copied while the previous tile is converted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import debug_barrier

from pagewire.worker.ops.triton.attention.hopper_tiles import HEAD_DIM, TILE, advanced

LOADER_WARPS = gl.constexpr(8)
# Registers of a thread, as in `prefill_hopper`: converting needs more than copying.
CONSUMER_REGISTERS = gl.constexpr(208)
LOADER_REGISTERS = gl.constexpr(48)
PART = gl.constexpr(64)  # lines of a tile that are converted at once


def part_layout(part: int, warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of `part` lines.

    A thread has eight adjacent numbers of a line, so that threads that access shared memory at the
    same time use all banks.
    """
    lines = [[1 << bit, 0] for bit in range(1, part.bit_length() - 1)]
    of_warps = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *lines[of_warps:]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        lines[:of_warps],
        [],
        [part, HEAD_DIM.value],
    )


OF_PART = gl.constexpr(part_layout(PART.value, LOADER_WARPS.value))
# Four numbers in FP8 times their scales, through float32: Hopper's instruction from float16 to
# bfloat16 converts one number, at an eighth of the rate of instructions that convert two.
_WIDEN = """{
    .reg .b16 low, high, h<4>;
    .reg .b32 a, b;
    .reg .f32 f<4>;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mov.b32 {h0, h1}, a;
    mov.b32 {h2, h3}, b;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    mul.f32 f0, f0, $3;
    mul.f32 f1, f1, $4;
    mul.f32 f2, f2, $5;
    mul.f32 f3, f3, $6;
    cvt.rn.TYPE.f32 $0, f1, f0;
    cvt.rn.TYPE.f32 $1, f3, f2;
}"""
_WIDEN_BFLOAT16 = gl.constexpr(_WIDEN.replace("TYPE", "bf16x2"))
_WIDEN_FLOAT16 = gl.constexpr(_WIDEN.replace("TYPE", "f16x2"))


@gluon.jit
def load_fp8_tiles(
    kv_tiles,
    table_ptr,
    head,
    length,
    stage,
    phase,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    counters_ptr,
    k_smem,
    v_smem,
    raw_smem,
    scales_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Load and convert the KV tiles of an item in FP8. The first tile is being copied already.

    Returns the next item, and the `stage` and `phase` after this item.
    """
    of_tile: gl.constexpr = gl.BlockedLayout([1], [32], [LOADER_WARPS], [0])
    # Scales are loaded one tile before they are needed, and their blocks are looked up two before.
    at = gl.arange(0, TILE, layout=of_tile)
    block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    line = (block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE
    k_scales = gl.load(k_scales_ptr + line, mask=at < length, other=0.0)
    v_scales = gl.load(v_scales_ptr + line, mask=at < length, other=0.0)
    at += TILE
    block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    ticket = 0
    for kv_tile in range(kv_tiles):
        # Late, so that programs with less work take items first.
        if kv_tile == kv_tiles - 1:
            ticket = gl.atomic_add(counters_ptr, 1)
        scales_smem.index(0).store(k_scales)
        scales_smem.index(1).store(v_scales)
        line = (block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE
        k_scales = gl.load(k_scales_ptr + line, mask=at < length, other=0.0)
        v_scales = gl.load(v_scales_ptr + line, mask=at < length, other=0.0)
        at += TILE
        block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
        next_line, seen = lines_of_tile(
            table_ptr, (kv_tile + 1) * TILE, head, length, KV_HEADS, BLOCK_SIZE
        )

        mbarrier.wait(k_empty.index(stage), phase)
        async_copy.wait_group(1)
        debug_barrier()
        _convert(raw_smem.index(0), scales_smem.index(0), k_smem.index(stage))
        fence_async_shared()
        debug_barrier()
        mbarrier.arrive(k_full.index(stage))
        if kv_tile < kv_tiles - 1:
            copy_lines(k_ptr, next_line, seen, raw_smem.index(0))
        async_copy.commit_group()  # an empty group keeps the count

        mbarrier.wait(v_empty.index(stage), phase)
        async_copy.wait_group(1)
        debug_barrier()
        _convert(raw_smem.index(1), scales_smem.index(1), v_smem.index(stage))
        fence_async_shared()
        debug_barrier()
        mbarrier.arrive(v_full.index(stage))
        if kv_tile < kv_tiles - 1:
            copy_lines(v_ptr, next_line, seen, raw_smem.index(1))
        async_copy.commit_group()  # an empty group keeps the count
        stage, phase = advanced(stage, phase)
    return ticket, stage, phase


@gluon.jit
def lines_of_tile(table_ptr, first, head, length, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Return the cache's line of each position of the KV tile at `first`, and which ones exist."""
    # A thread copies 16 bytes of every 32nd line.
    of_copy: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [LOADER_WARPS, 1], [1, 0])
    at = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, of_copy))
    block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    return (block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE, at < length


@gluon.jit
def copy_lines(ptr, line, seen, raw_smem):
    """Begin to copy lines of the cache in FP8, and zeros where `seen` is False."""
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, line.type.layout.parent))
    at = (line.to(gl.int64) * HEAD_DIM)[:, None] + dim[None, :]
    async_copy.async_copy_global_to_shared(raw_smem, ptr + at, mask=seen[:, None])


@gluon.jit
def _convert(raw_smem, scales_smem, tile_smem):
    """Write a tile of FP8 numbers times their scales, in the type of `tile_smem`."""
    for part in gl.static_range(TILE // PART):
        numbers = raw_smem.slice(part * PART, PART).load(OF_PART)
        scales = scales_smem.slice(part * PART, PART).load(gl.SliceLayout(1, OF_PART))
        if tile_smem.dtype == gl.bfloat16:
            wide = gl.inline_asm_elementwise(
                _WIDEN_BFLOAT16,
                "=r,=r,r,r,r,r,r",
                [numbers, scales[:, None]],
                dtype=gl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            wide = gl.inline_asm_elementwise(
                _WIDEN_FLOAT16,
                "=r,=r,r,r,r,r,r",
                [numbers, scales[:, None]],
                dtype=gl.float16,
                is_pure=True,
                pack=4,
            )
        tile_smem.slice(part * PART, PART).store(wide)
