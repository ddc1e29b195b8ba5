"""From the weights of a checkpoint to those that the decoder computes with."""

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.config.latent import LatentConfig
from pagewire.worker.model.rotary_table import rotary_order
from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops.contract.quantized import LinearWeight, ScaledWeight, tensors_of


def served_weights(config: ModelConfig, weights: Weights) -> Weights:
    """The weights that the decoder computes with; changes those of the checkpoint in place.

    Multipliers and norms are multiplied into the matrices where possible. The values of heads get
    the order in which the kernels rotate them. In bfloat16 this rounds weights once more, and
    activations once less. Quantized values do not change: multipliers change their scales, norms
    stay separate, and only whole rows are reordered.
    """
    if config.norm == "rms_plus_one":
        for norm in (weights.norm, *(n for layer in weights.layers for n in layer.norms())):
            if norm is not None:
                norm += 1.0
    if config.logit_multiplier != 1.0:
        weights.norm.mul_(config.logit_multiplier)
        if weights.norm_bias is not None:
            weights.norm_bias.mul_(config.logit_multiplier)
        if isinstance(weights.head, ScaledWeight) and weights.head.input_scale is not None:
            weights.head.input_scale.mul_(config.logit_multiplier)
    layers = []
    for number, layer in enumerate(weights.layers):
        if config.residual_multiplier != 1.0:
            _scale_additions(config, layer)
        if config.experts is not None and config.experts.transposed:
            _put_gates_first(layer)
        if config.norms_folded:
            layer = _with_norms_folded(layer)
        layers.append(_with_heads_placed(config, number, layer))
    return replace(weights, layers=tuple(layers))


def _put_gates_first(layer: LayerWeights) -> None:
    """Reorders each expert's rows, in which gates and values alternate: the gates come first."""
    for tensor in (layer.gate_up, layer.gate_up_bias):
        if isinstance(tensor, Tensor):  # quantized rows are in order already
            for expert in tensor:  # one at a time needs little memory
                expert.copy_(torch.cat((expert[::2], expert[1::2])))


def _with_norms_folded(layer: LayerWeights) -> LayerWeights:
    layer = replace(layer, input_norm=_folded(layer.input_norm, layer.qkv))
    if layer.router is not None:
        # A router with twice rounded weights chooses other experts more often. That changes a token
        # far more than a rounding does.
        return layer
    return replace(layer, post_norm=_folded(layer.post_norm, layer.gate_up))


def _folded(norm: Tensor | None, matrix: LinearWeight) -> Tensor | None:
    """The weight of a norm if it stays separate, before a quantized matrix; else None."""
    if norm is None or not isinstance(matrix, Tensor):
        return norm
    matrix *= norm
    return None


def _scale_additions(config: ModelConfig, layer: LayerWeights) -> None:
    """Scales the outputs of attention and MLP by `residual_multiplier`.

    Norms after attention and MLP receive the factor if they exist, because a norm undoes a factor
    of its input.
    """
    behind = layer.attended_norm is not None
    added = (
        (layer.attended_norm, layer.mlp_norm)
        if behind
        else (layer.output, layer.output_bias, layer.down, layer.down_bias, layer.shared_down)
    )
    for weight in added:
        if weight is not None:
            tensor = weight if isinstance(weight, Tensor) else weight.scales
            tensor.mul_(config.residual_multiplier)


def _with_heads_placed(config: ModelConfig, number: int, layer: LayerWeights) -> LayerWeights:
    """The layer with the values of each head at the places that the kernels read.

    Queries and keys have the order of `rotary_order`; values keep their order. Padding is 0.
    """
    order = rotary_order(config.ropes[number], config)
    if order is None:
        return layer
    if config.latent is not None:
        _place_rotated(config.latent, layer, order)
        return layer
    order, size = order.to(tensors_of(layer.qkv)[0].device), config.head_dim
    rotated = (config.num_heads + config.num_kv_heads) * size
    if config.served_head_dim == size:
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:rotated]
        qkv = layer.qkv[:rotated] if isinstance(layer.qkv, Tensor) else None
        for tensor in (qkv, bias, layer.q_norm, layer.k_norm):
            if tensor is not None:
                tensor.copy_(_placed(tensor, order, size))
        if isinstance(layer.qkv, Tensor):
            return layer
        rows = torch.arange(config.qkv_size, device=order.device)
        rows[:rotated] = _placed(rows[:rotated], order, size)
        return replace(layer, qkv=layer.qkv.in_order(rows))
    assert isinstance(layer.qkv, Tensor)  # `with_heads_for_kernels` refuses others
    assert isinstance(layer.output, Tensor)
    in_order = torch.arange(config.served_head_dim, device=order.device).clamp(max=size)

    def projected(tensor: Tensor) -> Tensor:
        heads, values = tensor[:rotated], tensor[rotated:]
        return torch.cat((_placed(heads, order, size), _placed(values, in_order, size)))

    return replace(
        layer,
        qkv=projected(layer.qkv),
        qkv_bias=None if layer.qkv_bias is None else projected(layer.qkv_bias),
        output=_placed(layer.output.t(), in_order, size).t().contiguous(),
    )


def _place_rotated(latent: LatentConfig, layer: LayerWeights, order: Tensor) -> None:
    """Reorders the rotated values of queries and keys, their last rows, by `order`, in place."""
    assert isinstance(layer.qkv, Tensor)  # quantized weights are refused
    queries = layer.qkv[: -latent.cached_dim] if layer.query_up is None else layer.query_up
    assert isinstance(queries, Tensor)
    rotated = latent.rotated_dim
    heads = queries.unflatten(0, (-1, latent.query_dim))[:, -rotated:]
    heads.copy_(heads[:, order.to(heads.device)])
    key = layer.qkv[-rotated:]
    key.copy_(key[order.to(key.device)])


def _placed(tensor: Tensor, order: Tensor, size: int) -> Tensor:
    """Heads `[heads * size, ...]` with the values `order` of each; value number `size` is 0."""
    heads = tensor.unflatten(0, (-1, size))
    padded = torch.cat((heads, torch.zeros_like(heads[:, :1])), dim=1)
    return padded[:, order].flatten(0, 1)
