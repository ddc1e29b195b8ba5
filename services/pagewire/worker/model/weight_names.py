"""Where each tensor of a Hugging Face checkpoint belongs in the weights."""

from collections.abc import Iterator

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.stacks import layer_name, layer_stacks
from pagewire.worker.model.weights import LayerWeights, Weights

NORMS = ("input_norm", "q_norm", "k_norm", "attended_norm", "post_norm", "mlp_norm")


def named_views(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint, the view of the weights that it fills.

    Tensors of quantized layers are not included; `quantized_parts` describes them.
    """
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if weights.norm_bias is not None:
        views["model.norm.bias"] = weights.norm_bias
    if not config.tied_head and isinstance(weights.head, Tensor):
        views["lm_head.weight"] = weights.head
    for number, layer in enumerate(weights.layers):
        for name, view in _layer_views(config, number, layer):
            views[f"{layer_name(config, number)}{name}"] = view
    return views


def _layer_views(
    config: ModelConfig, number: int, layer: LayerWeights
) -> Iterator[tuple[str, Tensor]]:
    names = config.names
    for part in NORMS:
        weight, bias = getattr(layer, part), getattr(layer, f"{part}_bias", None)
        if weight is not None:
            yield f"{names.part(part)}.weight", weight
        if bias is not None:
            yield f"{names.part(part)}.bias", bias
    if layer.correction is not None:
        yield names.part("correction"), layer.correction
    if layer.sinks is not None:
        yield names.part("sinks"), layer.sinks
    yield from _expert_views(config, layer)
    yield from _projections(config, number, layer)


def _expert_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each matrix and bias of the MLP of a layer with experts."""
    if layer.router is None:
        return
    names = config.names
    yield f"{names.part('router')}.weight", layer.router
    if layer.router_bias is not None:
        yield f"{names.part('router')}.bias", layer.router_bias
    if "experts_gate_up" in names.parts:
        yield from _views_of_all_experts(config, layer)
    if layer.shared_gate is not None:
        yield f"{names.part('shared_gate')}.weight", layer.shared_gate


def _views_of_all_experts(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of matrices and biases that hold all experts of a layer."""
    transposed = config.experts is not None and config.experts.transposed
    for field in ("gate_up", "down"):
        name = config.names.part(f"experts_{field}")
        weight, bias = getattr(layer, field), getattr(layer, f"{field}_bias")
        if isinstance(weight, Tensor) and transposed:
            # Rows of gates and values alternate until all are loaded (`served_weights`).
            yield name, weight.transpose(1, 2)
        elif isinstance(weight, Tensor):
            yield f"{name}.weight", weight
        if bias is not None:
            yield f"{name}_bias", bias


def _projections(
    config: ModelConfig, number: int, layer: LayerWeights
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each plain matrix, and of each bias."""
    for field, stack in layer_stacks(config, number).items():
        if stack.together:
            continue
        weight, bias = getattr(layer, field), getattr(layer, f"{field}_bias", None)
        if isinstance(weight, Tensor) and stack.experts:
            weight = weight.flatten(0, 1)
        for suffix, whole in (("weight", weight), ("bias", bias)):
            if isinstance(whole, Tensor):
                for name, part in zip(stack.names, whole.split(list(stack.rows)), strict=True):
                    yield f"{name}.{suffix}", part
