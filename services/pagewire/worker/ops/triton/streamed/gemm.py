"""The GEMM of few tokens in the reference order on Hopper, written in Gluon.

The time of such a GEMM is that of reading its weights, and of the chain of matrix instructions
that the order requires: one for each 16 columns, each waiting for the previous one. A program
multiplies a few rows of the weight by all tokens. The copy engine fills shared memory with tiles of
weights while the kernel that computes the input may still run, and stays ahead of the chain.

A matrix instruction reads 64 rows. In a program with fewer rows, it also reads the shared memory
after them, and the program drops these results. So even weights of few rows have as many programs
as there are multiprocessors.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.device import dependent_launch, is_hopper
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.streamed.config import StreamConfig, streams

COLUMNS = gl.constexpr(64)  # of a tile: 128 bytes, what the copy engine swizzles
HEIGHT = gl.constexpr(64)  # rows of a matrix instruction
EIGHT = gl.constexpr(8)  # rows of gates, then rows of values, alternate in a tile
REGISTERS = 96  # of a thread, so that programs of several kernels run at once
LOADER_REGISTERS = gl.constexpr(40)
_MAX_PAIRINGS = gl.constexpr(17)  # of 131,072 values


def is_supported(tokens: int, weight: Tensor) -> bool:
    """Tell whether this kernel multiplies a weight `[rows, k]` by `tokens` tokens."""
    rows, k = weight.shape
    return (
        streams(tokens, rows, k)
        and is_hopper(weight.device)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and k % COLUMNS.value == 0
        and rows % 16 == 0
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    inverse: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    config: StreamConfig,
) -> Tensor:
    """Store `x @ weight.T` in `out`; with `add`, add it to `out`.

    With `gated` the weight holds gates, then values, and `out` is `silu(gate) * value`. Products
    are multiplied by `inverse [tokens]` float32, if given. With `eps` the factor is the inverse
    root mean square of `x`, a single token. Rows of `x` begin at multiples of 16 bytes.
    """
    tokens, k = x.shape
    features = out.shape[1]
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    stages = min(config.stages, cdiv(k, config.tiles * COLUMNS.value))
    if gated:
        # Eight rows of gates, then the eight of their values, and so on.
        pairs = weight.view(2, features // EIGHT.value, EIGHT.value, k).transpose(0, 1)
        weights = _tiles(pairs, [config.rows // 16, 2, EIGHT.value, COLUMNS.value])
    else:
        weights = _tiles(weight, [config.rows, COLUMNS.value])
    stream_kernel[(cdiv(weight.shape[0], config.rows),)](
        weights,
        _tiles(x, [config.tokens, COLUMNS.value]),
        x,
        x if inverse is None else inverse,
        weight if bias is None else bias,
        out,
        tokens,
        features,
        k,
        0.0 if eps is None else eps,
        ROWS=config.rows,
        TOKENS=config.tokens,
        TILES=config.tiles,
        STAGES=stages,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        SCALED=inverse is not None,
        HIDDEN=0 if eps is None else k,
        BLOCK=1 if eps is None else next_power_of_2(k),
        PDL=pdl,
        num_warps=4,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
        **launch,
    )
    return out


def _tiles(matrix: Tensor, shape: list[int]) -> TensorDescriptor:
    """Return the descriptor of the tiles of a matrix in two bytes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor.from_tensor(matrix, shape, layout)


@gluon.jit(do_not_specialize=["tokens"])
def stream_kernel(
    weight_tiles,  # descriptor of [features, K], or of [features / 8, 2, 8, K] if GATED
    x_tiles,  # descriptor of [tokens, K]
    x_ptr,  # [1, K], read if HIDDEN
    inverse_ptr,  # [tokens] float32, if SCALED
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    eps,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    SCALED: gl.constexpr,
    HIDDEN: gl.constexpr,  # K, if the factor of a single token is computed here; else 0
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply ROWS weight rows by TOKENS tokens. The grid is `[weight rows / ROWS]`.

    Shared memory holds STAGES times TILES tiles of COLUMNS columns.

    With ADD or GATED the next kernel is another GEMM, which may load its first weights at once.
    Without them it may be RoPE, which reads `x` before it waits (`waited_for` in `rope`). It is
    allowed to start only after this kernel has waited, when `x` is complete.
    """
    if PDL and (ADD or GATED):
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_tiles.dtype
    # An instruction reads HEIGHT rows, so the last tile is followed by tiles that are never filled.
    BEHIND: gl.constexpr = HEIGHT // ROWS - 1
    w_shape: gl.constexpr = [STAGES * TILES + BEHIND] + weight_tiles.block_shape  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, w_shape, weight_tiles.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * TILES, TOKENS, COLUMNS], x_tiles.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # weights and inputs
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                x_ptr, inverse_ptr, bias_ptr, out_ptr, tokens, features, K, eps, w_smem, x_smem,
                full, empty, ROWS, TOKENS, TILES, STAGES, GATED, ADD, BIAS, SCALED, HIDDEN, BLOCK,
                PDL,
            )),
            (_load, (
                weight_tiles, x_tiles, K, w_smem, x_smem, full, empty, ROWS, TILES, STAGES, GATED,
                PDL,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy_weights(
    weight_tiles, run, w_smem, stage, full,
    ROWS: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start the copies of run number `run` of TILES tiles of weights."""
    mbarrier.expect(full.index(stage), TILES * ROWS * COLUMNS * 2)
    for tile in gl.static_range(TILES):
        to = w_smem.index(stage * TILES + tile)
        column = (run * TILES + tile) * COLUMNS
        if GATED:
            at = [gl.program_id(0) * (ROWS // 16), 0, 0, column]
        else:
            at = [gl.program_id(0) * ROWS, column]
        tma.async_copy_global_to_shared(weight_tiles, at, full.index(stage), to)


@gluon.jit
def _copy_inputs(x_tiles, run, x_smem, stage, full, TILES: gl.constexpr):
    """Start the copies of run number `run` of TILES tiles of the input."""
    mbarrier.expect(full.index(stage), TILES * x_smem.shape[1] * COLUMNS * 2)
    for tile in gl.static_range(TILES):
        column = (run * TILES + tile) * COLUMNS
        tma.async_copy_global_to_shared(
            x_tiles, [0, column], full.index(stage), x_smem.index(stage * TILES + tile)
        )


@gluon.jit
def _load(
    weight_tiles, x_tiles, K, w_smem, x_smem, full, empty,
    ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copy all tiles."""
    runs = gl.cdiv(K, TILES * COLUMNS)
    for stage in gl.static_range(STAGES):
        _copy_weights(weight_tiles, stage, w_smem, stage, full, ROWS, TILES, GATED)
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _copy_inputs(x_tiles, stage, x_smem, stage, full, TILES)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for run in range(STAGES, runs):
        mbarrier.wait(empty.index(stage), phase)
        _copy_weights(weight_tiles, run, w_smem, stage, full, ROWS, TILES, GATED)
        _copy_inputs(x_tiles, run, x_smem, stage, full, TILES)
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _consume(
    x_ptr, inverse_ptr, bias_ptr, out_ptr, tokens, features, K, eps, w_smem, x_smem, full, empty,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr,
    HIDDEN: gl.constexpr, BLOCK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and store."""
    dtype: gl.constexpr = w_smem.dtype
    if PDL:
        gdc_wait()
        if not (ADD or GATED):
            gdc_launch_dependents()
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, of_sums))
    # These arrive while products are computed.
    if ADD:
        at, mask = _places(out_ptr, tokens, features, of_sums, ROWS, HEIGHT, TOKENS)
        held = gl.load(at, mask=mask, other=0.0)
    if SCALED:
        inverse = gl.load(inverse_ptr + token, mask=token < tokens, other=0.0)[None, :]
    if HIDDEN:
        inverse = _inverse_rms(x_ptr, eps, HIDDEN, BLOCK)
    acc = gl.zeros([HEIGHT, TOKENS], gl.float32, layout=of_sums)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    before = gl.to_tensor(STAGES - 1)
    for run in range(gl.cdiv(K, TILES * COLUMNS)):
        mbarrier.wait(full.index(stage), phase)
        for tile in gl.static_range(TILES):
            w = w_smem.index(stage * TILES + tile)
            w = w._reinterpret(dtype, [HEIGHT, COLUMNS], x_smem.layout)
            x = x_smem.index(stage * TILES + tile).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
        acc = warpgroup_mma_wait(TILES, deps=(acc,))
        if run > 0:
            mbarrier.arrive(empty.index(before))
        before = stage
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    # The product is rounded before anything else is done to it, as cuBLAS does.
    out = acc.to(out_ptr.dtype.element_ty).to(gl.float32)
    if SCALED or HIDDEN:
        out *= inverse
    if GATED:
        pairs = gl.reshape(out, (HEIGHT // 16, 2, EIGHT, TOKENS))
        gate, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
        gated = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (HEIGHT // 2, TOKENS))
        of_gates: gl.constexpr = gated.type.layout
        at, mask = _places(out_ptr, tokens, features, of_gates, ROWS // 2, HEIGHT // 2, TOKENS)
        gl.store(at, gated.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at, mask = _places(out_ptr, tokens, features, of_sums, ROWS, HEIGHT, TOKENS)
        if BIAS:
            row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, of_sums))
            output = gl.program_id(0) * ROWS + row
            inside = (row < ROWS) & (output < features)
            bias = gl.load(bias_ptr + output, mask=inside, other=0.0).to(gl.float32)
            out += bias[:, None]
        if ADD:
            out += held.to(gl.float32)
        gl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _inverse_rms(x_ptr, eps, HIDDEN: gl.constexpr, BLOCK: gl.constexpr):
    """Return the inverse root mean square of one token, in the order of `ordered_inverse_rms`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    x = gl.load(x_ptr + column, mask=column < HIDDEN, other=0.0).to(gl.float32)
    # Not by `sum_of_pairs`: the interpreter cannot load Gluon functions that call Triton's.
    x *= x
    for _ in gl.static_range(_MAX_PAIRINGS):
        if x.shape[1] > 1:
            x = gl.sum(gl.reshape(x, (1, x.shape[1] // 2, 2)), 2)
    return gl.max(gl.rsqrt(gl.reshape(x, (1,)) / HIDDEN + eps), 0)


@gluon.jit
def _places(
    out_ptr, tokens, features, layout: gl.constexpr,
    ROWS: gl.constexpr, HELD: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the addresses of a tensor `[HELD, TOKENS]` of results, and which of them are stored.

    Its first ROWS rows are those of the program.
    """
    row = gl.arange(0, HELD, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    output = gl.program_id(0) * ROWS + row
    mask = ((row < ROWS) & (output < features))[:, None] & (token < tokens)[None, :]
    return out_ptr + token.to(gl.int64)[None, :] * features + output[:, None], mask
