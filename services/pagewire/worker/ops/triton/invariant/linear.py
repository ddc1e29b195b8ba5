"""Linear layers in the reference order: one accumulator adds the columns from first to last.

In this order, tensor cores return the same bits for every tile, number of tokens and order of the
operands. cuBLAS returns the same bits where it does not split k; its algorithms are compared with
these kernels when a worker starts (`startup.tuning`).

Every number of tokens rounds the same values: the normalized input, the product, the sum with a
bias or a residual, and the gated activation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.cublas.gemm import gemm, gemm_add, is_chosen
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.invariant.activation import silu_mul
from pagewire.worker.ops.triton.invariant.linear_config import (
    OrderedConfig,
    any_tokens,
    ordered_config,
)
from pagewire.worker.ops.triton.invariant.norm import factors_of, inverse_rms, is_late, rms_norm
from pagewire.worker.ops.triton.rowwise.activation import silu_of
from pagewire.worker.ops.triton.streamed.config import StreamConfig, stream_config
from pagewire.worker.ops.triton.streamed.gemm import is_supported, multiply


@triton.jit
def _weights(weight, column, start, K, RAGGED: tl.constexpr):
    """Load columns from `start` of weight rows, `[ROWS, BLOCK_K]`."""
    if RAGGED:
        return tl.load(weight + start, mask=start + column < K, other=0.0)
    else:
        return tl.load(weight + start)


@triton.jit
def _inputs(x_tile, column, start, K, present, RAGGED: tl.constexpr):
    """Load columns from `start` of the tokens, `[BLOCK_T, BLOCK_K]`."""
    inside = present
    if RAGGED:
        inside = present & (start + column < K)
    return tl.load(x_tile + start, mask=inside, other=0.0)


# Not specialized for `tokens`: Triton would compile the values 1 and multiples of 16 separately.
@triton.jit(do_not_specialize=["tokens"])
def _ordered_kernel(
    x_ptr,  # [tokens, K]
    inverse_ptr,  # [tokens] float32
    weight_ptr,  # [features, K], or [2 * features, K] if GATED
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    RAGGED: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows by BLOCK_T tokens.

    The grid is `[weight rows / ROWS, tokens / BLOCK_T]`. GATED, ADD and BIAS are as in
    `ops.triton.linear`. SCALED: the product of each token is multiplied by its `inverse`. RAGGED:
    BLOCK_K does not divide K. AHEAD tiles of weights are loaded while the kernel that computes `x`
    may still run.
    """
    if PDL:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(row, features * (ROWS // OUTPUTS) - 1)
    if GATED:  # gate and up rows alternate
        row = row // 2 + row % 2 * features
    first = tl.program_id(1) * BLOCK_T
    token = (first + tl.arange(0, BLOCK_T)[:, None]).to(tl.int64)  # [BLOCK_T, 1]
    present = token < tokens
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    weight = weight_ptr + row.to(tl.int64) * K + column  # [ROWS, BLOCK_K]
    x_tile = x_ptr + token * x_stride + column  # [BLOCK_T, BLOCK_K]

    ahead = ()
    for tile in tl.static_range(AHEAD):
        ahead += (_weights(weight, column, tile * BLOCK_K, K, RAGGED),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_T], tl.float32)
    for tile in tl.static_range(AHEAD):
        x = _inputs(x_tile, column, tile * BLOCK_K, K, present, RAGGED)
        acc = tl.dot(ahead[tile], tl.trans(x), acc, input_precision="ieee")
    for start in tl.range(AHEAD * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        w = _weights(weight, column, start, K, RAGGED)
        x = _inputs(x_tile, column, start, K, present, RAGGED)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")

    # The product is rounded before any other operation, as in cuBLAS.
    out = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
    if SCALED:
        here = first + tl.arange(0, BLOCK_T)
        out *= tl.load(inverse_ptr + here, mask=here < tokens, other=0.0)[None, :]
    if GATED:
        pairs = tl.permute(tl.reshape(out, (OUTPUTS, 2, BLOCK_T)), (0, 2, 1))
        gate, up = tl.split(pairs)
        out = silu_of(gate) * up  # [OUTPUTS, BLOCK_T]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    token = (first + tl.arange(0, BLOCK_T)[None, :]).to(tl.int64)
    mask = (output < features) & (token < tokens)
    to = out_ptr + token * features + output
    if BIAS:
        out += tl.load(bias_ptr + output, mask=output < features, other=0.0).to(tl.float32)
    if ADD:
        out += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    config: OrderedConfig | StreamConfig | None = None,
) -> Tensor:
    """Implement `LinearOps.linear`; `weight` is contiguous in all functions of this module."""
    config = config or _config(x, weight, out)
    if config is None:
        product = gemm(x, weight, out)
        return product if bias is None else product.add_(bias)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    return _launch(x, weight, out, config, bias=bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    config: OrderedConfig | StreamConfig | None = None,
) -> Tensor:
    return linear(rms_norm(x, norm_weight, eps), weight, bias, out, config=config)


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    config: OrderedConfig | StreamConfig | None = None,
) -> Tensor:
    """Implement `LinearOps.linear_add`."""
    config = config or _config(x, weight, residual, add=True)
    if config is None:
        return gemm_add(x, weight, residual)
    return _launch(x, weight, residual, config, add=True)


def norm_gate_up_silu_mul(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    *,
    config: OrderedConfig | StreamConfig | None = None,
) -> Tensor:
    config = config or _config(x, weight, None, gated=True)
    late = norm_weight is None and is_late(x)
    if not late:
        x = rms_norm(x, norm_weight, eps)
    if config is None:
        unscaled, inverse = factors_of(x, eps) if late else (None, None)
        return silu_mul(gemm(x, weight), unscaled, eps, inverse=inverse)
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if late and isinstance(config, StreamConfig) and len(x) == 1:
        return _launch(x, weight, out, config, eps=eps, gated=True)
    inverse = inverse_rms(x, eps) if late else None
    return _launch(x, weight, out, config, inverse=inverse, gated=True)


def waits_first(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernel of `linear` lets the next kernel start only when `x` is complete."""
    return isinstance(_config(x, weight, None), StreamConfig)


def _config(
    x: Tensor, weight: Tensor, out: Tensor | None, add: bool = False, gated: bool = False
) -> OrderedConfig | StreamConfig | None:
    """Return the tiles for a product, or None if cuBLAS has an algorithm in this order."""
    (tokens, k), rows = x.shape, weight.shape[0]
    if is_supported(tokens, weight):
        return stream_config(tokens, rows, k, gated)
    config = ordered_config(tokens, rows, k, weight.element_size())
    if config is None and not is_chosen(x, weight, out, add):
        return any_tokens(tokens, k, weight.element_size())
    return config


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: OrderedConfig | StreamConfig,
    *,
    eps: float | None = None,
    inverse: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    """Launch a kernel; with `eps`, the kernel computes `inverse` of a single token itself."""
    tokens, features = out.shape
    if tokens == 0:
        return out
    if isinstance(config, StreamConfig):
        return multiply(
            x, weight, out, bias, eps=eps, inverse=inverse, gated=gated, add=add, config=config
        )
    pdl = dependent_launch(x.device)
    k = weight.shape[1]
    _ordered_kernel[(cdiv(weight.shape[0], config.rows), cdiv(tokens, config.tokens))](
        x,
        weight if inverse is None else inverse,
        weight,
        weight if bias is None else bias,
        out,
        tokens,
        features,
        k,
        x.stride(0),
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        BLOCK_T=config.tokens,
        AHEAD=config.ahead,
        STAGES=config.stages,
        RAGGED=k % config.block_k != 0,
        SCALED=inverse is not None,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
