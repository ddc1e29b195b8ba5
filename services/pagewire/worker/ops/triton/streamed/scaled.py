"""The GEMM of FP8 weights and few tokens on Hopper, written in Gluon.

It works like `gemm`: a loader, which is one warp, fills shared memory with tiles of weights while
the kernel that computes the input may still run. Programs are persistent. The loader works ahead
into the next rows of its program while the results of the previous ones are stored.

Sums of 128 products leave the tensor cores and are added in float32. Their order is that of the
plain kernel, `quantized.scaled`, and so are the bits.

A single token may be given before its norm and quantization. Then each program computes them.
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

from pagewire.worker.ops.contract.quantized import LARGEST, QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.streamed.scaled_config import (
    MAX_TOKENS,
    ScaledStream,
    fits,
    held_tiles,
    part_of,
)

COLUMNS = gl.constexpr(128)  # of a tile: as many products as the tensor cores add up
HEIGHT = gl.constexpr(64)  # rows of a matrix instruction
EIGHT = gl.constexpr(8)  # rows of gates, then rows of values, alternate in a tile
LOADER_REGISTERS = gl.constexpr(40)
FP8_LARGEST = gl.constexpr(LARGEST[torch.float8_e4m3fn])


def is_supported(tokens: int, weight: ScaledWeight, dtype: torch.dtype) -> bool:
    """Tell whether this kernel multiplies `weight` by `tokens` tokens, with results in `dtype`."""
    return 1 <= tokens <= MAX_TOKENS and suits_hopper(weight, dtype)


def suits_hopper(weight: ScaledWeight, dtype: torch.dtype) -> bool:
    """Tell whether Hopper's kernels can multiply an FP8 weight, with results in `dtype`."""
    rows, k = weight.shape
    return (
        is_hopper(weight.values.device)
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.block == (1, k)
        and k % COLUMNS.value == 0
        and rows % 16 == 0
        and weight.scales.stride(0) == 1
        and dtype in (torch.bfloat16, torch.float16)
    )


def multiply(
    x: QuantizedInput,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    gated: bool = False,
    config: ScaledStream,
) -> None:
    """Store `x @ weight.T + bias` in `out`, with `gated` its `silu_mul`; with `add`, add the
    product to `out`."""
    tokens, k = x.values.shape
    assert k % COLUMNS.value == 0, "the columns of the weight are no multiple of 128"
    pieces = x.values.view(tokens, k // COLUMNS.value, COLUMNS.value).transpose(0, 1)
    x_tiles = _tiles(pieces, [config.tiles, config.tokens, COLUMNS.value])
    scales, stride = x.scales, x.scales.stride(0)
    _launch(
        x_tiles, None, None, scales, stride, weight, out, bias, tokens, 0.0, False, add, gated,
        config,
    )  # fmt: skip


def multiply_token(
    x: Tensor,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    gated: bool = False,
    config: ScaledStream,
) -> None:
    """Like `multiply`, with a token `x [1, K]` that the programs quantize, with `norm` after its
    norm."""
    _launch(
        None, x, norm_weight, weight.input_scale, 0, weight, out, bias, 1, eps, norm, add, gated,
        config,
    )  # fmt: skip


def _launch(
    x_tiles: TensorDescriptor | None,
    token: Tensor | None,
    norm_weight: Tensor | None,
    x_scales: Tensor | None,
    x_scales_stride: int,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None,
    tokens: int,
    eps: float,
    norm: bool,
    add: bool,
    gated: bool,
    config: ScaledStream,
) -> None:
    (rows, k), features = weight.shape, out.shape[1]
    own = token is not None
    assert k % COLUMNS.value == 0, "the columns of the weight are no multiple of 128"
    assert tokens <= config.tokens
    assert own == config.own
    assert fits(config, k, gated), "these tiles do not fit"
    device = weight.values.device
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    part = part_of(config.rows)
    if gated:
        # Eight rows of gates, then the eight of their values, and so on.
        pairs = weight.values.view(2, features // EIGHT.value, EIGHT.value, k).transpose(0, 1)
        weights = _tiles(pairs, [part // 16, 2, EIGHT.value, COLUMNS.value])
    else:
        weights = _tiles(weight.values, [part, COLUMNS.value])
    runs = cdiv(rows, config.rows)
    most = cdiv(runs, multiprocessors(device))  # runs of a program
    scaled_stream_kernel[(cdiv(runs, most),)](
        weights,
        weights if x_tiles is None else x_tiles,
        out if token is None else token,
        out if norm_weight is None else norm_weight,
        weight.scales if x_scales is None else x_scales,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        tokens,
        features,
        k,
        x_scales_stride,
        eps,
        ROWS=config.rows,
        PART=part,
        TOKENS=config.tokens,
        TILES=config.tiles,
        STAGES=config.stages,
        HELD=held_tiles(k, config.tiles) if own else 0,
        OWN=k if own else 0,
        NORM=norm,
        NORM_WEIGHT=norm_weight is not None,
        STATIC=own and x_scales is not None,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        maxnreg=config.registers,
        **launch,
    )


def _tiles(matrix: Tensor, shape: list[int]) -> TensorDescriptor:
    """Return the descriptor of the tiles of a matrix in one byte."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=len(shape))
    return TensorDescriptor.from_tensor(matrix, shape, layout)


@gluon.jit(do_not_specialize=["tokens", "x_scales_stride"])
def scaled_stream_kernel(
    weight_tiles,  # descriptor of [rows, K], or of [features / 8, 2, 8, K] if GATED
    x_tiles,  # descriptor of [K / 128, tokens, 128], unless OWN
    token_ptr,  # [K], read if OWN
    norm_ptr,  # [K]
    x_scales_ptr,  # [tokens, 1]
    weight_scales_ptr,  # [rows, 1]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    x_scales_stride,
    eps,
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    TOKENS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    HELD: gl.constexpr,
    OWN: gl.constexpr,  # K, if the programs quantize the token; else 0
    NORM: gl.constexpr,
    NORM_WEIGHT: gl.constexpr,
    STATIC: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply every n-th run of ROWS weight rows by TOKENS tokens. The grid is any number of
    programs, n.

    Shared memory holds STAGES times TILES tiles of weights. A tile arrives in copies of PART rows.
    Tiles of the input arrive with the weights. With OWN all are there, HELD tiles.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_tiles.dtype
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    # An instruction reads HEIGHT rows, so the last tile is followed by rows that are never filled.
    PARTS: gl.constexpr = STAGES * TILES * (ROWS // PART) + (HEIGHT - ROWS) // PART
    w_shape: gl.constexpr = [PARTS] + weight_tiles.block_shape  # noqa: RUF005
    X_TILES: gl.constexpr = HELD if OWN else STAGES * TILES
    w_smem = gl.allocate_shared_memory(dtype, w_shape, weight_tiles.layout)
    x_smem = gl.allocate_shared_memory(dtype, [X_TILES, TOKENS, COLUMNS], tiled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 if OWN else 2)  # weights, and inputs
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    rows = features * (2 if GATED else 1)
    gl.warp_specialize(
        [
            (_consume, (
                token_ptr, norm_ptr, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, tokens,
                features, rows, K, x_scales_stride, eps, w_smem, x_smem, full, empty, ROWS,
                PART, TOKENS, TILES, STAGES, HELD, OWN, NORM, NORM_WEIGHT, STATIC, GATED, ADD,
                BIAS, PDL,
            )),
            (_load, (
                weight_tiles, x_tiles, rows, K, w_smem, x_smem, full, empty, ROWS, PART,
                TOKENS, TILES, STAGES, OWN, GATED, PDL,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy_weights(
    weight_tiles, position, steps, w_smem, stage, full,
    ROWS: gl.constexpr, PART: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start the copies of TILES tiles of weights, those of step number `position`."""
    PARTS: gl.constexpr = ROWS // PART
    row = (gl.program_id(0) + position // steps * gl.num_programs(0)) * ROWS
    first = position % steps * TILES
    mbarrier.expect(full.index(stage), TILES * ROWS * COLUMNS)
    for tile in gl.static_range(TILES):
        for part in gl.static_range(PARTS):
            to = w_smem.index((stage * TILES + tile) * PARTS + part)
            column = (first + tile) * COLUMNS
            if GATED:
                at = [(row + part * PART) // 16, 0, 0, column]
            else:
                at = [row + part * PART, column]
            tma.async_copy_global_to_shared(weight_tiles, at, full.index(stage), to)


@gluon.jit
def _copy_inputs(
    x_tiles, first, x_smem, to, ready, TOKENS: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Start the copy of TILES tiles of the input, from tile `first` on."""
    pieces: gl.constexpr = x_tiles.layout
    place = x_smem.index(to)._reinterpret(x_smem.dtype, [TILES, TOKENS, COLUMNS], pieces)
    tma.async_copy_global_to_shared(x_tiles, [first, 0, 0], ready, place)


@gluon.jit
def _load(
    weight_tiles, x_tiles, rows, K, w_smem, x_smem, full, empty,
    ROWS: gl.constexpr, PART: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, OWN: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copy all tiles."""
    X_BYTES: gl.constexpr = TILES * TOKENS * COLUMNS
    steps = gl.cdiv(K, TILES * COLUMNS)
    runs = gl.cdiv(gl.cdiv(rows, ROWS) - gl.program_id(0), gl.num_programs(0))
    ahead = gl.minimum(STAGES, runs * steps)
    for position in range(ahead):
        _copy_weights(
            weight_tiles, position, steps, w_smem, position, full, ROWS, PART, TILES, GATED
        )
    if not OWN:
        if PDL:
            gdc_wait()
        for position in range(ahead):
            mbarrier.expect(full.index(position), X_BYTES)
            first = position % steps * TILES
            _copy_inputs(
                x_tiles, first, x_smem, position * TILES, full.index(position), TOKENS, TILES
            )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for position in range(STAGES, runs * steps):
        mbarrier.wait(empty.index(stage), phase)
        _copy_weights(weight_tiles, position, steps, w_smem, stage, full, ROWS, PART, TILES, GATED)
        if not OWN:
            mbarrier.expect(full.index(stage), X_BYTES)
            first = position % steps * TILES
            _copy_inputs(x_tiles, first, x_smem, stage * TILES, full.index(stage), TOKENS, TILES)
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _consume(
    token_ptr, norm_ptr, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, tokens, features, rows,
    K, x_scales_stride, eps, w_smem, x_smem, full, empty,
    ROWS: gl.constexpr, PART: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, OWN: gl.constexpr, NORM: gl.constexpr,
    NORM_WEIGHT: gl.constexpr, STATIC: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and store."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, of_sums))
    if PDL:
        gdc_wait()
    if OWN:
        x_scale = _quantize_token(
            token_ptr, norm_ptr, x_scales_ptr, eps, x_smem, OWN, HELD, NORM, NORM_WEIGHT, STATIC
        )
    else:
        x_scale = gl.load(
            x_scales_ptr + token.to(gl.int64) * x_scales_stride, mask=token < tokens, other=0.0
        )[None, :]
    none = gl.zeros([HEIGHT, TOKENS], gl.float32, layout=of_sums)
    steps = gl.cdiv(K, TILES * COLUMNS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for run in range(gl.program_id(0), gl.cdiv(rows, ROWS), gl.num_programs(0)):
        # These arrive while products are computed.
        row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, of_sums))
        source = run * ROWS + row
        if GATED:
            source = source // 16 * EIGHT + source % 8 + source // 8 % 2 * features
        inside = (row < ROWS) & (run * ROWS + row < rows)
        scale = gl.load(weight_scales_ptr + source, mask=inside, other=0.0)[:, None]
        if BIAS:
            bias = gl.load(bias_ptr + source, mask=inside, other=0.0).to(gl.float32)[:, None]
        if ADD and TOKENS <= 32:  # more would not fit the registers
            at, mask = _places(out_ptr, run, tokens, features, of_sums, ROWS, HEIGHT, TOKENS)
            held = gl.load(at, mask=mask, other=0.0)
        acc = none
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            tile = stage * TILES
            x_tile = step * TILES if OWN else tile
            a = product(w_smem, x_smem, tile, x_tile, none, ROWS, PART)
            b = product(w_smem, x_smem, tile + 1, x_tile + 1, none, ROWS, PART)
            if TILES == 4:
                c = product(w_smem, x_smem, tile + 2, x_tile + 2, none, ROWS, PART)
                d = product(w_smem, x_smem, tile + 3, x_tile + 3, none, ROWS, PART)
                a, b, c, d = warpgroup_mma_wait(0, deps=(a, b, c, d))
            else:
                a, b = warpgroup_mma_wait(0, deps=(a, b))
            mbarrier.arrive(empty.index(stage))
            acc += a
            acc += b
            if TILES == 4:
                acc += c
                acc += d
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            phase = gl.where(last, phase ^ 1, phase)
        out = acc * (x_scale * scale)
        if GATED:
            stored = out.to(out_ptr.dtype.element_ty).to(gl.float32)
            pairs = gl.reshape(stored, (HEIGHT // 16, 2, EIGHT, TOKENS))
            gate, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
            gated = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (HEIGHT // 2, TOKENS))
            of_gates: gl.constexpr = gated.type.layout
            at, mask = _places(
                out_ptr, run, tokens, features, of_gates, ROWS // 2, HEIGHT // 2, TOKENS
            )
            gl.store(at, gated.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            if BIAS:
                out += bias
            rounded = out.to(out_ptr.dtype.element_ty)
            at, mask = _places(out_ptr, run, tokens, features, of_sums, ROWS, HEIGHT, TOKENS)
            if ADD:
                if TOKENS > 32:
                    held = gl.load(at, mask=mask, other=0.0)
                summed = rounded.to(gl.float32) + held.to(gl.float32)
                rounded = summed.to(out_ptr.dtype.element_ty)
            gl.store(at, rounded, mask=mask)


@gluon.jit
def product(w_smem, x_smem, tile, x_tile, none, ROWS: gl.constexpr, PART: gl.constexpr):
    """Start the product of a tile of weights and a tile of inputs, the sums of 128 products."""
    w = w_smem.index(tile * (ROWS // PART))
    w = w._reinterpret(w_smem.dtype, [HEIGHT, COLUMNS], x_smem.layout)
    x = x_smem.index(x_tile).permute((1, 0))
    return warpgroup_mma(
        w, x, none, use_acc=False, is_async=True, max_num_imprecise_acc=COLUMNS
    )  # fmt: skip


@gluon.jit
def _quantize_token(
    token_ptr, norm_ptr, static_ptr, eps, x_smem,
    K: gl.constexpr, HELD: gl.constexpr, NORM: gl.constexpr, NORM_WEIGHT: gl.constexpr,
    STATIC: gl.constexpr,
):  # fmt: skip
    """Store the token's FP8 numbers as the first row of each tile of the input; return the scale.

    The other rows stay as they are: they only change results that are dropped.
    """
    BLOCK: gl.constexpr = HELD * COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    column = gl.arange(0, BLOCK, layout=layout)
    inside = column < K
    x = gl.load(token_ptr + column, mask=inside, other=0.0).to(gl.float32)
    if NORM:
        x *= gl.rsqrt(gl.sum(x * x, 0) / K + eps)
        if NORM_WEIGHT:
            x *= gl.load(norm_ptr + column, mask=inside, other=0.0).to(gl.float32)
        x = x.to(token_ptr.dtype.element_ty).to(gl.float32)
    if STATIC:
        scale = gl.load(static_ptr)
    else:
        magnitude = gl.max(gl.abs(x), 0)
        # Not by `scale_of`: the interpreter cannot load Gluon functions that call Triton's.
        scale = gl.where(magnitude == 0, 1.0, gl.div_rn(magnitude, magnitude * 0 + FP8_LARGEST))
    # The exact quotient of `quantize.divided`.
    factor = gl.where(scale < 2.0**-60, 2.0**64, 1.0)
    divisor = scale * factor
    inverse = gl.div_rn(divisor * 0 + 1.0, divisor)
    divisors = gl.full([BLOCK], 0.0, gl.float32, layout=layout) + divisor
    inverses = gl.full([BLOCK], 0.0, gl.float32, layout=layout) + inverse
    x *= factor
    quotient = x * inverse
    x = gl.fma(gl.fma(-quotient, divisors, x), inverses, quotient)
    x = gl.minimum(gl.maximum(x, -FP8_LARGEST), FP8_LARGEST).to(x_smem.dtype)
    WIDTH: gl.constexpr = x_smem.shape[1] * COLUMNS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first_rows = x_smem._reinterpret(x_smem.dtype, [HELD, WIDTH], flat).slice(0, COLUMNS, 1)
    first_rows.store(gl.reshape(x, (HELD, COLUMNS)))
    fence_async_shared()
    return scale


@gluon.jit
def _places(
    out_ptr, run, tokens, features, layout: gl.constexpr,
    ROWS: gl.constexpr, HELD: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the addresses of a tensor `[HELD, TOKENS]` of results, and which of them are stored.

    Its first ROWS rows are those of the program.
    """
    row = gl.arange(0, HELD, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    output = run * ROWS + row
    mask = ((row < ROWS) & (output < features))[:, None] & (token < tokens)[None, :]
    return out_ptr + token.to(gl.int64)[None, :] * features + output[:, None], mask
