"""Linear layers for few tokens: a matrix-vector kernel and a skinny GEMM kernel.

On Hopper the skinny GEMM is the kernel of `streamed`, for more shapes and tokens. On other GPUs it
is the kernel below.

With few tokens the time of a GEMM is the time to read its weights. Both kernels therefore read the
weights once and compute the operations around the GEMM as well. The matrix-vector kernel also folds
in the norm of its input: with norm weight g, `rms_norm(x) @ W.T` is
`((x * g) @ W.T) * rsqrt(mean(x^2) + eps)`. So one pass computes the dot products and the sum of
squares, and no program waits for a sum of another program.

For more tokens, `linear_config` chooses cuBLAS, and separate kernels compute the other operations.
If g is already multiplied into the weights, the norm still needs no kernel: the kernel after the
GEMM multiplies by `rsqrt(mean(x^2) + eps)` (`unscaled` in `rope` and `activation`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.cublas.gemm import gemm, gemm_add
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.linear_config import SkinnyConfig, VectorConfig, linear_config
from pagewire.worker.ops.triton.rowwise.activation import silu_mul, silu_of
from pagewire.worker.ops.triton.rowwise.norm import rms_norm, scales_late
from pagewire.worker.ops.triton.streamed.config import StreamConfig, stream_config
from pagewire.worker.ops.triton.streamed.gemm import is_supported, multiply

Config = VectorConfig | SkinnyConfig | StreamConfig

# With more tokens the kernel of `streamed` is faster than the matrix-vector kernel.
MAX_VECTOR_TOKENS = 1


@triton.jit
def _weight_rows(row, features, GATED: tl.constexpr):
    """Map the rows of a program to rows of the weight: with GATED, gate and up rows alternate."""
    if GATED:
        row = row // 2 + row % 2 * features
    return row.to(tl.int64)


@triton.jit
def _vector_kernel(
    x_ptr,  # [TOKENS, K]
    norm_ptr,  # [K]
    weight_ptr,  # [features, K]
    bias_ptr,  # [features]
    out_ptr,  # [TOKENS, features]
    features,
    x_stride,
    eps,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the weight by a few tokens with elementwise products and sums.

    A program computes ROWS weight rows times all TOKENS tokens. The grid is `[weight rows / ROWS]`.
    With more than one token, BLOCK_K covers K.

    NORM: the input is normalized. NORM_WEIGHT: the norm has a weight, which is not yet multiplied
    into `weight`. GATED: `weight` is `[2 * features, K]`, and the output is `silu(gate) * up`. ADD:
    the result is added to `out`. BIAS: a bias is added.
    """
    if PDL:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = row < features * (ROWS // OUTPUTS)
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    weight = weight_ptr + _weight_rows(row, features, GATED) * K + column  # [ROWS, BLOCK_K]

    # The first weights are loaded while the kernel that computes `x` may still run.
    w = tl.load(weight, mask=inside & (column < K), other=0.0, eviction_policy="evict_first")
    if NORM_WEIGHT:
        g = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=output < features, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    # Issue the loads of all inputs before the first one is used.
    inputs = ()
    residuals = ()
    for token in tl.static_range(TOKENS):
        x = tl.load(x_ptr + token * x_stride + column, mask=column < K, other=0.0)
        inputs += (x,)  # type: ignore[assignment]
        if ADD:
            held = out_ptr + token * features + output
            residual = tl.load(held, mask=output < features, other=0.0)
            residuals += (residual,)  # type: ignore[assignment]

    for token in tl.static_range(TOKENS):
        x = inputs[token].to(tl.float32)  # [1, BLOCK_K]
        if NORM:
            squares = x * x
        if NORM_WEIGHT:
            x *= g.to(tl.float32)
        product = w.to(tl.float32) * x  # [ROWS, BLOCK_K]
        if TOKENS == 1:
            for start in tl.static_range(BLOCK_K, K, BLOCK_K):
                mask = start + column < K
                w = tl.load(weight + start, inside & mask, 0.0, eviction_policy="evict_first")
                x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
                if NORM:
                    squares += x * x
                if NORM_WEIGHT:
                    x *= tl.load(norm_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
                product += w.to(tl.float32) * x
        out = tl.sum(product, axis=1)  # [ROWS]
        if NORM:
            out *= tl.rsqrt(tl.sum(squares) / K + eps)
        if GATED:
            gate, up = tl.split(tl.reshape(out, (OUTPUTS, 2)))
            out = silu_of(gate) * up
        if BIAS:
            out += bias
        if ADD:
            # Rounding the product first would make the kernel up to a fifth slower.
            out += residuals[token].to(tl.float32)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * features + output, out, mask=output < features)


# Not specialized for `tokens`: Triton would compile the values 1 and multiples of 16 separately.
@triton.jit(do_not_specialize=["tokens"])
def _skinny_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [features, K]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the weight by up to BLOCK_T tokens on the tensor cores.

    A program computes ROWS weight rows times all tokens. The grid is `[weight rows / ROWS]`. K is a
    multiple of BLOCK_K. Flags are those of `_vector_kernel`. Weights are the left operand, because
    a matrix instruction has more rows than columns.

    With ADD or GATED the next kernel is another GEMM, which may load its first weights at once.
    Without them it is RoPE or sampling, which may read `x` before it waits (`waited_for` in
    `rope`). So the next kernel may start only after this kernel has waited, when `x` is complete.
    """
    if PDL and (ADD or GATED):
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(row, features * (ROWS // OUTPUTS) - 1)
    token = tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    weight = weight_ptr + _weight_rows(row, features, GATED) * K + column  # [ROWS, BLOCK_K]
    x_tile = x_ptr + token * x_stride + column  # [BLOCK_T, BLOCK_K]

    # The first weights are loaded while the kernel that computes `x` may still run.
    w = tl.load(weight)
    if PDL:
        gdc_wait()
        if not (ADD or GATED):
            gdc_launch_dependents()
    x = tl.load(x_tile, mask=token < tokens, other=0.0)
    acc = tl.dot(w, x.T, input_precision="ieee")  # [ROWS, BLOCK_T]
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        w = tl.load(weight + start)
        x = tl.load(x_tile + start, mask=token < tokens, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")

    if GATED:
        pairs = tl.permute(tl.reshape(acc, (OUTPUTS, 2, BLOCK_T)), (0, 2, 1))
        gate, up = tl.split(pairs)
        acc = silu_of(gate) * up  # [OUTPUTS, BLOCK_T]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    token = tl.arange(0, BLOCK_T)[None, :]
    mask = (output < features) & (token < tokens)
    out = out_ptr + token * features + output
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=output < features, other=0.0)
    if ADD:
        acc += tl.load(out, mask=mask, other=0.0)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    config: Config | None = None,
) -> Tensor:
    """Implement `LinearOps.linear`; `weight` is contiguous in all functions of this module."""
    config = config or choose_config(x, weight)
    if config is None:
        if bias is None:
            return gemm(x, weight, out)
        return torch.addmm(bias, x, weight.t(), out=out)  # as F.linear, which has no `out`
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
    config: Config | None = None,
) -> Tensor:
    config = config or choose_config(x, weight)
    if not isinstance(config, VectorConfig):
        return linear(rms_norm(x, norm_weight, eps), weight, bias, out, config=config)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    return _launch(x, weight, out, config, bias=bias, norm=True, norm_weight=norm_weight, eps=eps)


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    config: Config | None = None,
) -> Tensor:
    """Implement `LinearOps.linear_add`."""
    config = config or choose_config(x, weight)
    if config is None:
        return gemm_add(x, weight, residual)
    return _launch(x, weight, residual, config, add=True)


def norm_gate_up_silu_mul(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    *,
    config: Config | None = None,
) -> Tensor:
    config = config or choose_config(x, weight, gated=True)
    if config is None:
        if norm_weight is None and scales_late(x):
            return silu_mul(gemm(x, weight), x, eps)
        return silu_mul(norm_linear(x, norm_weight, eps, weight))
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if not isinstance(config, VectorConfig):
        return _launch(rms_norm(x, norm_weight, eps), weight, out, config, gated=True)
    return _launch(x, weight, out, config, norm=True, norm_weight=norm_weight, eps=eps, gated=True)


def choose_config(x: Tensor, weight: Tensor, gated: bool = False) -> Config | None:
    """Return the kernel and tiles for `x [tokens, k]` and `weight [rows, k]`; None means cuBLAS."""
    (tokens, k), rows = x.shape, weight.shape[0]
    config = linear_config(tokens, rows, k, weight.element_size())
    if isinstance(config, VectorConfig) and tokens <= MAX_VECTOR_TOKENS:
        return config
    return stream_config(tokens, rows, k, gated) if is_supported(tokens, weight) else config


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: Config,
    *,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    tokens, features = out.shape
    if isinstance(config, StreamConfig):
        return multiply(x, weight, out, bias, gated=gated, add=add, config=config)
    pdl = dependent_launch(x.device)
    flags = {
        "GATED": gated,
        "ADD": add,
        "BIAS": bias is not None,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": config.warps,
        "ROWS": config.rows,
        "BLOCK_K": config.block_k,
    }
    grid = (cdiv(weight.shape[0], config.rows),)
    if isinstance(config, VectorConfig):
        _vector_kernel[grid](
            x,
            weight if norm_weight is None else norm_weight,
            weight,
            weight if bias is None else bias,
            out,
            features,
            x.stride(0),
            eps,
            TOKENS=tokens,
            K=weight.shape[1],
            NORM=norm,
            NORM_WEIGHT=norm_weight is not None,
            **flags,
        )
    else:
        _skinny_kernel[grid](
            x,
            weight,
            weight if bias is None else bias,
            out,
            tokens,
            features,
            weight.shape[1],
            x.stride(0),
            BLOCK_T=max(8, next_power_of_2(tokens)),
            STAGES=config.stages,
            **flags,
        )
    return out
