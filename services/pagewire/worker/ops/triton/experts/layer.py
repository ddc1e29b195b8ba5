"""A layer with experts: the norm and the router, then everything after them.

For few tokens the kernels of `vector`, `packed_vector` and `streamed.experts` compute the layer:
they neither sort rows nor store the results of single experts. Otherwise rows are sorted for the
grouped GEMMs.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows, Routes, Routing
from pagewire.worker.ops.contract.quantized import LinearWeight, QuantizedInput, ScaledWeight
from pagewire.worker.ops.triton.experts import hopper, scaled_hopper
from pagewire.worker.ops.triton.experts.config import (
    MAX_PACKED_TOKENS,
    MAX_SCORED_TOKENS,
    MAX_VECTOR_TOKENS,
)
from pagewire.worker.ops.triton.experts.packed_vector import (
    is_float4,
    packed_down_add,
    packed_gate_up,
)
from pagewire.worker.ops.triton.experts.projections import experts_down, experts_gate_up_silu_mul
from pagewire.worker.ops.triton.experts.routing import choose, empty_counts, route
from pagewire.worker.ops.triton.experts.rows import copy_rows, sort_routes
from pagewire.worker.ops.triton.experts.vector import (
    is_vector_weight,
    scores,
    vector_down_add,
    vector_gate_up,
)
from pagewire.worker.ops.triton.experts.weighted_sum import add_experts
from pagewire.worker.ops.triton.rowwise.norm import rms_norm
from pagewire.worker.ops.triton.rowwise.quantize import quantize, quantize_rows
from pagewire.worker.ops.triton.streamed import experts as streamed


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Routes]:
    """Implement `ExpertOps.norm_route`; the rows of `x` may have any stride."""
    if 0 < len(x) <= MAX_SCORED_TOKENS:
        counts = empty_counts(x, routing)
        normed, logits = scores(x, norm_weight, eps, router, bias, counts)
        return normed, choose(logits, routing, correction, counts)
    normed = rms_norm(x, norm_weight, eps)
    return normed, route(normed, router, routing, correction, bias)


def experts_add(
    x: Tensor,
    routes: Routes,
    num_experts: int,
    gate_up: LinearWeight,
    down: LinearWeight,
    residual: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Implement `ExpertOps.experts_add`; all tensors are contiguous."""
    tokens = len(x) if shared is None else 0
    if 0 < tokens <= MAX_PACKED_TOKENS and is_float4(gate_up) and is_float4(down):
        inner = packed_gate_up(x, gate_up, num_experts, routes.experts, gate_up_bias, clamp)
        return packed_down_add(inner, down, num_experts, routes, down_bias, residual)
    plain = gate_up_bias is None and down_bias is None and clamp is None
    if (
        plain
        and tokens == 1
        and isinstance(gate_up, ScaledWeight)
        and isinstance(down, ScaledWeight)
        and streamed.is_supported(x, routes.experts.shape[1], num_experts, gate_up, down)
    ):
        inner = streamed.stream_gate_up(x, gate_up, num_experts, routes.experts)
        return streamed.stream_down_add(inner, down, num_experts, routes, residual)
    if 0 < tokens <= MAX_VECTOR_TOKENS and is_vector_weight(gate_up) and is_vector_weight(down):
        inner = vector_gate_up(x, gate_up, num_experts, routes.experts, gate_up_bias, clamp)
        return vector_down_add(inner, down, num_experts, routes, down_bias, residual)
    pairs = routes.experts.numel()
    if (
        plain
        and isinstance(gate_up, ScaledWeight)
        and isinstance(down, ScaledWeight)
        and scaled_hopper.is_supported(x.dtype, gate_up, pairs, num_experts)
        and scaled_hopper.is_supported(x.dtype, down, pairs, num_experts)
    ):
        rows = sort_routes(routes, num_experts, tile=scaled_hopper.TILE.value)
        parts = _scaled_parts(x, gate_up, down, rows)
        return add_experts(parts, routes.weights, rows, residual, shared, shared_gate)
    if (
        plain
        and isinstance(gate_up, Tensor)
        and isinstance(down, Tensor)
        and hopper.is_supported(x.dtype, gate_up, pairs)
        and hopper.is_supported(x.dtype, down, pairs)
    ):
        rows = sort_routes(routes, num_experts, tile=hopper.TILE)
        parts = _plain_parts(x, gate_up, down, rows)
        return add_experts(parts, routes.weights, rows, residual, shared, shared_gate)
    rows = sort_routes(routes, num_experts)
    inner = experts_gate_up_silu_mul(_input(x, gate_up), gate_up, rows, gate_up_bias, clamp)
    parts = experts_down(_input(inner, down), down, rows, down_bias)
    return add_experts(parts, routes.weights, rows, residual, shared, shared_gate)


def _scaled_parts(x: Tensor, gate_up: ScaledWeight, down: ScaledWeight, rows: ExpertRows) -> Tensor:
    """Return the results of both projections by row, `[pairs, hidden]`, from Hopper's kernel."""
    pairs, tail = len(rows.pairs), scaled_hopper.TAIL
    of_tokens = rows.rows.view(len(x), rows.top_k)
    inner = x.new_empty((pairs, down.shape[1]))
    given = quantize_rows(x, gate_up.input_format, of_tokens, tail)
    scaled_hopper.multiply(given, gate_up, inner, rows, gated=True)
    parts = x.new_empty((pairs, x.shape[1]))
    given = quantize_rows(inner, down.input_format, None, tail)
    scaled_hopper.multiply(given, down, parts, rows, gated=False)
    return parts


def _plain_parts(x: Tensor, gate_up: Tensor, down: Tensor, rows: ExpertRows) -> Tensor:
    """Return the results of both projections by row, `[pairs, hidden]`, from Hopper's kernel."""
    inner = x.new_empty((len(rows.pairs), down.shape[2]))
    hopper.multiply(copy_rows(x, rows), gate_up, inner, rows, gated=True)
    parts = x.new_empty((len(rows.pairs), x.shape[1]))
    hopper.multiply(inner, down, parts, rows, gated=False)
    return parts


def _input(x: Tensor, weight: LinearWeight) -> Tensor | QuantizedInput:
    """Return the input of a product with `weight`, quantized if the weight is scaled."""
    return quantize(x, weight.input_format) if isinstance(weight, ScaledWeight) else x
