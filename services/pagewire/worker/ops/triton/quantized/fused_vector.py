"""Products of FP8 weights with one token that also quantize the token.

The time is that of reading the weight. Programs stay on their multiprocessor and multiply tile
after tile, while the next tiles are loading; the first ones are loaded while the kernel that
computes the token may still run. Each program computes the token's norm, its largest magnitude and
its FP8 numbers, once. That takes less time than a separate kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import LARGEST, ScaledWeight
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.rowwise.activation import silu_of
from pagewire.worker.ops.triton.rowwise.norm import inverse_rms
from pagewire.worker.ops.triton.rowwise.quantize import divided, rounded_to_fp8, scale_of

MAX_COLUMNS = 16384  # a token with this many fits the registers
_LARGEST = tl.constexpr(LARGEST[torch.float8_e4m3fn])


@dataclass(frozen=True, slots=True)
class VectorTiles:
    """A program multiplies `rows` weight rows at a time, by `warps` warps, and loads `depth` tiles
    ahead; `programs` of them run on a multiprocessor."""

    rows: int
    warps: int
    depth: int
    programs: int
    registers: int | None = None  # of a thread at most


def is_supported(x: Tensor, weight: ScaledWeight) -> bool:
    """Tell whether `multiply` can compute this product."""
    k = weight.shape[1]
    return (
        x.shape[0] == 1
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.block == (1, k)
        and k % 16 == 0
        and k <= MAX_COLUMNS
    )


def choose_tiles(k: int) -> VectorTiles:
    """Choose tiles for a weight with rows of `k` columns: the fastest for Llama-3.1-8B's matrices
    on an H100."""
    if k <= 4096:
        return VectorTiles(rows=8, warps=8, depth=1, programs=2)
    return VectorTiles(rows=4, warps=16, depth=1, programs=1)


def multiply(
    x: Tensor,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
    tiles: VectorTiles | None = None,
) -> None:
    """Store the product with `x [1, K]`, quantized in the weight's format, in `out [1, features]`.

    With `norm` the token is normalized first. With `gated` the weight has `2 * features` rows, and
    the result is `silu(gate) * up`, rounded as if gates and values had been stored. With `add` the
    product is added to `out`.
    """
    k = weight.shape[1]
    tiles = tiles or choose_tiles(k)
    pdl = dependent_launch(x.device)
    programs = min(tiles.programs * multiprocessors(x.device), cdiv(weight.shape[0], tiles.rows))
    _fused_vector_kernel[(programs,)](
        x,
        x if norm_weight is None else norm_weight,
        weight.scales if weight.input_scale is None else weight.input_scale,
        weight.values.view(torch.int32),
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        out.shape[1],
        weight.scales.stride(0),
        eps,
        K=k,
        ROWS=tiles.rows,
        BLOCK_K=max(16, next_power_of_2(k)),
        DEPTH=tiles.depth,
        NORM=norm,
        NORM_WEIGHT=norm_weight is not None,
        STATIC=weight.input_scale is not None,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        INTERPRETED=x.device.type == "cpu",
        PDL=pdl,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        launch_pdl=pdl,
    )


@triton.jit
def _row_of(tile, features, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return the weight rows of a tile, `[ROWS]`: with GATED, gate and up rows alternate."""
    row = tile * ROWS + tl.arange(0, ROWS)
    if GATED:
        row = tl.where(row < 2 * features, row // 2 + row % 2 * features, 2 * features)
    return row


@triton.jit
def _load_tile(
    weight_ptr,
    tile,
    features,
    rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Load the weights of a tile, `[ROWS, BLOCK_K / 4]` with four in each element.

    Weights past the last row or column are zeros.
    """
    row = _row_of(tile, features, ROWS, GATED)[:, None]
    column = tl.arange(0, BLOCK_K // 4)[None, :]
    mask = row < rows
    if BLOCK_K > K:
        mask &= column < K // 4
    at = weight_ptr + row.to(tl.int64) * (K // 4) + column
    return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _fp8_of(byte):
    """Return FP8 numbers whose bits are the lowest eight of `byte`, as float32."""
    return (byte & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _four_of(words, INTERPRETED: tl.constexpr):
    """Return the four FP8 numbers in each of int32 `words`, as float32."""
    if INTERPRETED:
        return _fp8_of(words), _fp8_of(words >> 8), _fp8_of(words >> 16), _fp8_of(words >> 24)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high, a, b; .reg .b32 pair; mov.b32 {low, high}, $4; "
            "cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {a, b}, pair; "
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; "
            "cvt.rn.f16x2.e4m3x2 pair, high; mov.b32 {a, b}, pair; "
            "cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _numbers_of(
    x_ptr,
    norm_ptr,
    static_ptr,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    STATIC: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the token's FP8 numbers as float32, `[BLOCK_K]`, and their scale; see `quantize`."""
    column = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    if NORM:
        x *= inverse_rms(x, eps, K, 0)
        if NORM_WEIGHT:
            x *= tl.load(norm_ptr + column, mask=column < K, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.load(static_ptr) if STATIC else scale_of(tl.max(tl.abs(x), 0), _LARGEST)
    x = divided(x, tl.broadcast_to(scale, (BLOCK_K,)), INTERPRETED)
    x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    if INTERPRETED:
        return rounded_to_fp8(x), scale
    else:
        return x.to(tl.float8e4nv).to(tl.float32), scale


@triton.jit
def _split_in_four(x, BLOCK_K: tl.constexpr):
    """Return every fourth value of `x [BLOCK_K]`, from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_K // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first[None, :], second[None, :], third[None, :], fourth[None, :]


@triton.jit
def _fused_vector_kernel(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    static_ptr,  # [1]
    weight_ptr,  # [rows, K]
    weight_scales_ptr,  # [rows, 1]
    bias_ptr,  # [features]
    out_ptr,  # [features]
    features,
    weight_scales_stride,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    STATIC: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply every n-th tile of ROWS weight rows. The grid is any number of programs, n."""
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL:
        gdc_launch_dependents()
    rows = features * (ROWS // OUTPUTS)
    tiles = tl.cdiv(rows, ROWS)
    step = tl.num_programs(0)
    tile = tl.program_id(0)
    w0 = _load_tile(weight_ptr, tile, features, rows, K, ROWS, BLOCK_K, GATED)
    w1 = w0
    w2 = w0
    if DEPTH > 1:
        w1 = _load_tile(weight_ptr, tile + step, features, rows, K, ROWS, BLOCK_K, GATED)
    if DEPTH > 2:
        w2 = _load_tile(weight_ptr, tile + 2 * step, features, rows, K, ROWS, BLOCK_K, GATED)
    if PDL:
        gdc_wait()
    x, x_scale = _numbers_of(
        x_ptr, norm_ptr, static_ptr, eps, K, BLOCK_K, NORM, NORM_WEIGHT, STATIC, INTERPRETED
    )
    x0, x1, x2, x3 = _split_in_four(x, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, step):
        row = _row_of(tile, features, ROWS, GATED)
        scale = tl.load(weight_scales_ptr + row * weight_scales_stride, row < rows, 0.0)
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = output < features
        if ADD:
            residual = tl.load(out_ptr + output, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
        a, b, c, d = _four_of(w0, INTERPRETED)
        product = a * x0 + b * x1 + c * x2 + d * x3  # [ROWS, BLOCK_K / 4]
        w0 = w1
        w1 = w2
        following = _load_tile(
            weight_ptr, tile + DEPTH * step, features, rows, K, ROWS, BLOCK_K, GATED
        )
        if DEPTH == 1:
            w0 = following
        elif DEPTH == 2:
            w1 = following
        else:
            w2 = following
        out = tl.sum(product, 1) * (x_scale * scale)  # [ROWS]
        if GATED:
            out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
            gate, up = tl.split(tl.reshape(out, (OUTPUTS, 2)))
            out = silu_of(gate) * up
        if BIAS:
            out += bias
        if ADD:
            out += residual
        tl.store(out_ptr + output, out.to(out_ptr.dtype.element_ty), mask=inside)
