"""Where each tensor of a Hugging Face checkpoint belongs in the weights."""

from collections.abc import Iterator

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.stacks import layer_name, layer_stacks
from pagewire.worker.model.weights import LayerWeights, Weights

NORMS = ("input_norm", "q_norm", "k_norm", "attended_norm", "post_norm", "mlp_norm")


def named_views(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint, the view of the weights it belongs to.

    Without the tensors of quantized layers, which `quantized_parts` describes.
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
    for name, weight in _expert_views(config, layer):
        yield f"{name}.weight", weight
    yield from _projections(config, number, layer)


def _expert_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields name and weight of each matrix of the MLP of a layer with experts."""
    if layer.router is None:
        return
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    names = config.names
    yield names.part("router"), layer.router
    if "experts_gate_up" in names.parts:
        yield names.part("experts_gate_up"), layer.gate_up
        yield names.part("experts_down"), layer.down
    else:
        for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for part, weight in (("gate", gate), ("up", up), ("down", down)):
                yield names.part(f"expert_{part}").format(expert=expert), weight
    if layer.shared_gate_up is None or layer.shared_down is None:
        return
    gate, up = layer.shared_gate_up.chunk(2)
    yield names.part("shared_gate_proj"), gate
    yield names.part("shared_up_proj"), up
    yield names.part("shared_down"), layer.shared_down
    if layer.shared_gate is not None:
        yield names.part("shared_gate"), layer.shared_gate


def _projections(
    config: ModelConfig, number: int, layer: LayerWeights
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each plain matrix, and of each bias."""
    for field, stack in layer_stacks(config, number).items():
        weight, bias = getattr(layer, field), getattr(layer, f"{field}_bias", None)
        for suffix, whole in (("weight", weight), ("bias", bias)):
            if isinstance(whole, Tensor):
                for name, part in zip(stack.names, whole.split(list(stack.rows)), strict=True):
                    yield f"{name}.{suffix}", part
