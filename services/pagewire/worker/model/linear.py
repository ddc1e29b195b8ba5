"""Linear layers of the decoder, whose weight is a tensor or quantized.

With a tensor, norm and activation are fused with the product, and the norm's weight is already
multiplied into the matrix. With a quantized weight, the norm keeps its own weight.
"""

from torch import Tensor

from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.quantized import GroupedWeight, LinearWeight


def norm_linear(
    ops: Ops,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rms_norm(x, norm, eps) @ weight.T + bias`, `[tokens, out_features]`: `out` if given."""
    if isinstance(weight, Tensor):
        return ops.norm_linear(x, norm, eps, weight, bias, out)
    if isinstance(weight, GroupedWeight):
        return ops.grouped_linear(ops.rms_norm(x, norm, eps), weight, bias, out)
    return ops.scaled_linear(
        ops.norm_quantize(x, norm, eps, weight.input_format), weight, bias, out
    )


def linear_add(ops: Ops, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
    """Adds `x @ weight.T` to `residual [tokens, out_features]` in place and returns it."""
    if isinstance(weight, Tensor):
        return ops.linear_add(x, weight, residual)
    if isinstance(weight, GroupedWeight):
        return ops.grouped_linear_add(x, weight, residual)
    return ops.scaled_linear_add(ops.quantize(x, weight.input_format), weight, residual)


def gated_mlp_add(
    ops: Ops,
    residual: Tensor,
    norm: Tensor | None,
    eps: float,
    gate_up: LinearWeight,
    down: LinearWeight,
) -> Tensor:
    """Adds the gated feed-forward layer to `residual [tokens, hidden]` in place and returns it.

    `norm` is None if it is multiplied into `gate_up`.
    """
    if isinstance(gate_up, Tensor):
        gated = ops.norm_gate_up_silu_mul(residual, norm, eps, gate_up)
        return linear_add(ops, gated, down, residual)
    both = norm_linear(ops, residual, norm, eps, gate_up)  # [tokens, 2 * intermediate]
    if isinstance(down, Tensor | GroupedWeight):
        return linear_add(ops, ops.silu_mul(both), down, residual)
    return ops.scaled_linear_add(ops.silu_mul_quantize(both, down.input_format), down, residual)
