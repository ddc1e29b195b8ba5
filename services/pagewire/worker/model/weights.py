"""The weights of a model on its device. Projections with the same input are one matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are `[out_features, in_features]`; None is absent.

    `qkv` stacks the query, key and value projections, `gate_up` the gate and up projections, in
    this order. `input_norm` and `post_norm` exist only while weights are loaded. A norm's weight
    scales the columns of the next matrix, so `with_norms_folded` multiplies it into that matrix.
    """

    input_norm: Tensor | None  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor | None  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. `head` is the tensor `embedding` if the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor once."""
        yield self.embedding
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            yield from (value for value in values if value is not None)
        yield self.norm
        if self.head is not self.embedding:
            yield self.head

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights with the shapes of the model and undefined values."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(config.qkv_size, hidden),
            qkv_bias=empty(config.qkv_size) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            output=empty(hidden, config.num_heads * config.head_dim),
            output_bias=empty(hidden) if config.output_bias else None,
            post_norm=empty(hidden),
            gate_up=empty(2 * config.intermediate_size, hidden),
            down=empty(hidden, config.intermediate_size),
        )

    hidden = config.hidden_size
    embedding = empty(config.vocab_size, hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=empty(hidden),
        head=embedding if config.tied_head else empty(config.vocab_size, hidden),
    )


def with_norms_folded(weights: Weights) -> Weights:
    """The weights with each layer's norms multiplied into its matrices, in place.

    In bfloat16 this rounds the weights once more, and the activations once less.
    """
    return replace(weights, layers=tuple(_with_norms_folded(layer) for layer in weights.layers))


def _with_norms_folded(layer: LayerWeights) -> LayerWeights:
    for norm, matrix in ((layer.input_norm, layer.qkv), (layer.post_norm, layer.gate_up)):
        if norm is not None:
            matrix *= norm
    return replace(layer, input_norm=None, post_norm=None)


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Weights:
    """Random weights, to measure without a checkpoint: norms are 1, all others normal.

    The standard deviation is `initializer_range` of the configuration. The same seed gives the
    same weights on the same kind of device.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(weights.norm)}
    for layer in weights.layers:
        norms |= {id(x) for x in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)}
    for tensor in weights.tensors():
        if id(tensor) in norms:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
    return with_norms_folded(weights)


def named_views(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """For each tensor name of a Hugging Face checkpoint, the view of the weights it belongs to."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tied_head:
        views["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        for name, view in _layer_views(config, layer):
            views[f"model.layers.{index}.{name}"] = view
    return views


def _layer_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if layer.input_norm is not None and layer.post_norm is not None:
        yield "input_layernorm.weight", layer.input_norm
        yield "post_attention_layernorm.weight", layer.post_norm
    yield "self_attn.o_proj.weight", layer.output
    yield "mlp.down_proj.weight", layer.down
    for name, rows in zip("qkv", layer.qkv.split([query, key, key]), strict=True):
        yield f"self_attn.{name}_proj.weight", rows
    for name, rows in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
        yield f"mlp.{name}_proj.weight", rows
    if layer.qkv_bias is not None:
        for name, rows in zip("qkv", layer.qkv_bias.split([query, key, key]), strict=True):
            yield f"self_attn.{name}_proj.bias", rows
    if layer.output_bias is not None:
        yield "self_attn.o_proj.bias", layer.output_bias
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
