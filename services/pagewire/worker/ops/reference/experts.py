"""A mixture of experts in plain torch; see `contract.experts`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows, Routes, Routing
from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    LinearWeight,
    QuantizedInput,
    ScaledWeight,
)
from pagewire.worker.ops.reference import quantized
from pagewire.worker.ops.reference.activation import silu_mul
from pagewire.worker.ops.reference.norm import rms_norm

# Scores that are NaN are chosen last.
_LOWEST = -3e38


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Routes]:
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
    rows = sort_by_expert(routes.experts, num_experts)
    inputs = quantized_for(x, gate_up)
    inner = experts_gate_up_silu_mul(inputs, gate_up, rows, gate_up_bias, clamp)
    parts = experts_down(quantized_for(inner, down), down, rows, down_bias)
    return add_experts(parts, routes.weights, rows, residual, shared, shared_gate)


def quantized_for(x: Tensor, weight: LinearWeight) -> Tensor | QuantizedInput:
    """Return the input of a product with `weight`, quantized if the weight is scaled."""
    if isinstance(weight, ScaledWeight):
        return quantized.quantize(x, weight.input_format)
    return x


def route(
    x: Tensor,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    bias: Tensor | None = None,
) -> Routes:
    logits = F.linear(x.float(), router.float())  # [tokens, experts]
    if bias is not None:
        logits = logits + bias.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits
    choice = scores if correction is None else scores + correction
    choice = choice.nan_to_num(_LOWEST, posinf=-_LOWEST, neginf=_LOWEST)
    if routing.groups > 1:
        choice = _in_best_groups(choice, routing)
    # A stable sort puts the lower of two equal experts first, which `topk` does not promise.
    experts = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = _weights(logits, scores, experts, routing)
    return Routes(experts.int(), weights * routing.scale)


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """The scores `[tokens, experts]`, with minus infinity outside the best groups."""
    grouped = choice.unflatten(1, (routing.groups, -1))  # [tokens, groups, experts of a group]
    counted = 2 if routing.scoring == "sigmoid" else 1
    best = grouped.topk(counted, dim=2).values.sum(2)
    groups = best.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
    kept: Tensor = grouped.masked_fill(outside[:, :, None], -torch.inf)
    return kept.flatten(1)


def _weights(logits: Tensor, scores: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """The weights `[tokens, top_k]` of the chosen `experts`, before they are scaled."""
    if routing.scoring == "sigmoid":
        chosen = scores.gather(1, experts)
        return chosen / chosen.sum(1, keepdim=True) if routing.renormalize else chosen
    if routing.renormalize:
        return logits.gather(1, experts).softmax(1)
    return logits.softmax(1).gather(1, experts)


def sort_by_expert(experts: Tensor, num_experts: int) -> ExpertRows:
    flat = experts.flatten()
    pairs = flat.argsort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(len(pairs), device=pairs.device)
    starts = F.pad(torch.bincount(flat, minlength=num_experts).cumsum(0), (1, 0))
    used = torch.arange(num_experts, device=flat.device)[starts[1:] > starts[:-1]]
    tile = max(1, flat.numel())  # an expert is one tile
    return ExpertRows(
        top_k=experts.shape[1],
        pairs=pairs.int(),
        rows=rows.int(),
        starts=starts.int(),
        tile=tile,
        tiles=torch.stack((used, starts[:-1][used])).int(),
    )


def experts_gate_up_silu_mul(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
) -> Tensor:
    tokens = rows.pairs // rows.top_k
    out = _empty(x, weight, rows, gated=True)
    for expert, held in _held(rows):
        inner = _linear(x, tokens[held], weight, expert, rows, bias)
        out[held] = silu_mul(inner) if clamp is None else _clamped_swiglu(inner, clamp)
    return out


def _clamped_swiglu(inner: Tensor, clamp: ClampedSwiglu) -> Tensor:
    gate, up = inner.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)).to(inner.dtype)


def experts_down(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None = None,
) -> Tensor:
    out, every = _empty(x, weight, rows, gated=False), torch.arange(len(rows.pairs))
    for expert, held in _held(rows):
        out[held] = _linear(x, every[held].to(out.device), weight, expert, rows, bias)
    return out


def _linear(
    x: Tensor | QuantizedInput,
    chosen: Tensor,
    weight: LinearWeight,
    expert: int,
    rows: ExpertRows,
    bias: Tensor | None,
) -> Tensor:
    """The product of some rows of `x` with the weight of one expert."""
    bias = None if bias is None else bias[expert]
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return F.linear(x[chosen], weight[expert], bias)
    size = weight.shape[0] // (len(rows.starts) - 1)
    own = weight.rows(expert * size, (expert + 1) * size)
    if isinstance(own, GroupedWeight):
        assert isinstance(x, Tensor)
        return quantized.grouped_linear(x[chosen], own, bias)
    assert isinstance(x, QuantizedInput)
    values = x.values.view(torch.uint8)[chosen].view(x.values.dtype)
    return quantized.scaled_linear(QuantizedInput(values, x.scales[chosen], x.dtype), own, bias)


def _empty(
    x: Tensor | QuantizedInput, weight: LinearWeight, rows: ExpertRows, *, gated: bool
) -> Tensor:
    """An output of the experts with undefined values."""
    features = weight.shape[1]
    if not isinstance(weight, Tensor):
        features = weight.shape[0] // (len(rows.starts) - 1)
    return rows.pairs.new_empty((len(rows.pairs), features // (1 + gated)), dtype=x.dtype)


def _held(rows: ExpertRows) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows. Waits for the device."""
    starts = rows.starts.tolist()
    for expert, (begin, end) in enumerate(pairwise(starts)):
        if begin < end:
            yield expert, slice(begin, end)


def add_experts(
    parts: Tensor,
    weights: Tensor,
    rows: ExpertRows,
    residual: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    by_pair = parts[rows.rows].float().unflatten(0, (-1, rows.top_k))  # [tokens, top_k, hidden]
    total = torch.zeros_like(residual, dtype=torch.float32)
    for choice in range(rows.top_k):
        total += by_pair[:, choice] * weights[:, choice, None]
    if shared is not None:
        gate = 1.0 if shared_gate is None else shared_gate.float().sigmoid()
        total += shared.float() * gate
    return residual.add_(total.to(residual.dtype))
