"""From the weights of a checkpoint to those that the decoder computes with."""

from dataclasses import replace

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.rotary_table import rotary_order
from pagewire.worker.model.weights import LayerWeights, Weights


def served_weights(config: ModelConfig, weights: Weights) -> Weights:
    """The weights that the decoder computes with; changes those of the checkpoint in place.

    Multipliers and norms are multiplied into the matrices where that is possible, and the values of
    heads are brought into the order in which the kernels rotate them. In bfloat16 this rounds
    weights once more, and activations once less.
    """
    if config.norm == "rms_plus_one":
        for norm in (weights.norm, *(n for layer in weights.layers for n in layer.norms())):
            if norm is not None:
                norm += 1.0
    if config.logit_multiplier != 1.0:
        weights.norm.mul_(config.logit_multiplier)
        if weights.norm_bias is not None:
            weights.norm_bias.mul_(config.logit_multiplier)
    layers = []
    for number, layer in enumerate(weights.layers):
        if config.residual_multiplier != 1.0:
            _scale_additions(config, layer)
        if config.norms_folded:
            layer = _with_norms_folded(layer)
        _order_heads(config, number, layer)
        layers.append(layer)
    return replace(weights, layers=tuple(layers))


def _with_norms_folded(layer: LayerWeights) -> LayerWeights:
    for norm, matrix in ((layer.input_norm, layer.qkv), (layer.post_norm, layer.gate_up)):
        if norm is not None:
            matrix.mul_(norm)
    return replace(layer, input_norm=None, post_norm=None)


def _scale_additions(config: ModelConfig, layer: LayerWeights) -> None:
    """Multiplies what attention and MLP add to the residual stream by `residual_multiplier`.

    Norms behind attention and MLP take the factor, for they would undo it before them.
    """
    behind = layer.attended_norm is not None
    added = (
        (layer.attended_norm, layer.mlp_norm)
        if behind
        else (layer.output, layer.output_bias, layer.down, layer.down_bias)
    )
    for tensor in added:
        if tensor is not None:
            tensor.mul_(config.residual_multiplier)


def _order_heads(config: ModelConfig, number: int, layer: LayerWeights) -> None:
    """Brings the values of each query and key head into the order of `rotary_order`."""
    order = rotary_order(config.ropes[number], config.head_dim, config.interleaved)
    if order is None:
        return
    order = order.to(layer.qkv.device)
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
    parts = (layer.q_norm, layer.k_norm)
    for tensor in (layer.qkv[:rotated], _first(layer.qkv_bias, rotated), *parts):
        if tensor is not None:
            heads = tensor.view(-1, config.head_dim, *tensor.shape[1:])
            heads.copy_(heads[:, order])


def _first(tensor: Tensor | None, rows: int) -> Tensor | None:
    return None if tensor is None else tensor[:rows]
