"""Where each tensor of a Hugging Face checkpoint belongs in the weights."""

from collections.abc import Iterator

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.weights import LayerWeights, Weights

NORMS = ("input_norm", "q_norm", "k_norm", "attended_norm", "post_norm", "mlp_norm")


def named_views(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint, the view of the weights it belongs to."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if weights.norm_bias is not None:
        views["model.norm.bias"] = weights.norm_bias
    if not config.tied_head:
        views["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        for name, view in _layer_views(config, layer):
            views[f"model.layers.{index}.{name}"] = view
    return views


def _layer_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
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
    for part, weight, bias in _projections(config, layer):
        yield f"{names.part(part)}.weight", weight
        if bias is not None:
            yield f"{names.part(part)}.bias", bias


def _expert_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields name and weight of each matrix of the MLP of a layer with experts."""
    if layer.router is None:
        return
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
    config: ModelConfig, layer: LayerWeights
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yields name, weight and bias of each matrix that a checkpoint stores."""
    yield "output", layer.output, layer.output_bias
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _split(config, "qkv", ("q", "k", "v"), [query, key, key], layer.qkv, layer.qkv_bias)
    if layer.router is not None:
        return
    yield "down", layer.down, layer.down_bias
    inner = config.intermediate_size
    parts, sizes = (("gate", "up"), [inner, inner]) if config.gated else (("up",), [inner])
    yield from _split(config, "gate_up", parts, sizes, layer.gate_up, layer.gate_up_bias)


def _split(
    config: ModelConfig,
    whole: str,
    parts: tuple[str, ...],
    sizes: list[int],
    weight: Tensor,
    bias: Tensor | None,
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yields the parts of a matrix, or the whole if the family stores it so."""
    if whole in config.names.parts:
        yield whole, weight, bias
        return
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    yield from zip(parts, weight.split(sizes), biases, strict=True)
