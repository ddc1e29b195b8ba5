"""The weights of a model on its device. Projections with the same input are one matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.quantization.parts import QuantizedPart, empty_stacked
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Scheme
from pagewire.worker.model.quantization.stored import StoredLayer
from pagewire.worker.ops.contract.quantized import LinearWeight, tensors_of


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are `[out_features, in_features]`; None is absent.

    `qkv` stacks the query, key and value projections, `gate_up` the gate and up projections, in
    this order. A norm's weight scales the columns of the next matrix. `with_norms_folded`
    multiplies it into that matrix, so `input_norm` and `post_norm` exist only while weights are
    loaded, or before a quantized matrix.
    """

    input_norm: Tensor | None  # [hidden]
    qkv: LinearWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: LinearWeight  # [hidden, heads * head_dim]
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor | None  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. `head` is the tensor `embedding` if the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor once."""
        yield self.embedding
        for layer in self.layers:
            for field in fields(layer):
                value = getattr(layer, field.name)
                yield from [] if value is None else tensors_of(value)
        yield self.norm
        if self.head is not self.embedding:
            yield from tensors_of(self.head)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights with the shapes of the model and undefined values.

    Raises:
        SetupError: some of the projections with the same input are quantized otherwise than the
            others.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(index: int, stack: Stack) -> LinearWeight:
        scheme = _scheme(config, f"{_layer_name(index)}.", stack)
        if scheme is None:
            return empty(sum(stack.rows), stack.columns)
        return empty_stacked(scheme, stack.rows, stack.columns, dtype, device)

    def layer(index: int) -> LayerWeights:
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=matrix(index, stacks["qkv"]),
            qkv_bias=empty(config.qkv_size) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            output=matrix(index, stacks["output"]),
            output_bias=empty(hidden) if config.output_bias else None,
            post_norm=empty(hidden),
            gate_up=matrix(index, stacks["gate_up"]),
            down=matrix(index, stacks["down"]),
        )

    hidden, stacks = config.hidden_size, _stacks(config)
    embedding, head = empty(config.vocab_size, hidden), _head_stack(config)
    head_scheme = None if config.tied_head else _scheme(config, "", head)
    untied = (
        empty(config.vocab_size, hidden)
        if head_scheme is None
        else empty_stacked(head_scheme, head.rows, hidden, dtype, device)
    )
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=empty(hidden),
        head=embedding if config.tied_head else untied,
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """Projections with the same input, in the order of their rows in one matrix."""

    names: tuple[str, ...]  # in the checkpoint, after the name of the layer
    rows: tuple[int, ...]
    columns: int


def _stacks(config: ModelConfig) -> dict[str, Stack]:
    """The projections of each matrix of `LayerWeights`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return {
        "qkv": Stack(qkv, (query, key, key), hidden),
        "output": Stack(("self_attn.o_proj",), (hidden,), query),
        "gate_up": Stack(("mlp.gate_proj", "mlp.up_proj"), (intermediate, intermediate), hidden),
        "down": Stack(("mlp.down_proj",), (hidden,), intermediate),
    }


def _head_stack(config: ModelConfig) -> Stack:
    return Stack(("lm_head",), (config.vocab_size,), config.hidden_size)


def _layer_name(index: int) -> str:
    return f"model.layers.{index}"


def _scheme(config: ModelConfig, prefix: str, stack: Stack) -> Scheme | None:
    """How a matrix is quantized; None for a plain one."""
    if config.quantization is None:
        return None
    schemes = [config.quantization.scheme_of(f"{prefix}{name}") for name in stack.names]
    if any(scheme != schemes[0] for scheme in schemes):
        found = ", ".join(f"{n}: {s}" for n, s in zip(stack.names, schemes, strict=True))
        raise SetupError(
            f"config.json: quantization_config describes different formats for projections of "
            f"{prefix.rstrip('.')} that are one matrix ({found}); use weights in which all of "
            "these, or none, are quantized"
        )
    return schemes[0]


def with_norms_folded(weights: Weights) -> Weights:
    """The weights with each layer's norms multiplied into its plain matrices, in place.

    In bfloat16 this rounds the weights once more, and the activations once less.
    """
    return replace(weights, layers=tuple(_with_norms_folded(layer) for layer in weights.layers))


def _with_norms_folded(layer: LayerWeights) -> LayerWeights:
    before = _folded(layer.input_norm, layer.qkv)
    return replace(layer, input_norm=before, post_norm=_folded(layer.post_norm, layer.gate_up))


def _folded(norm: Tensor | None, matrix: LinearWeight) -> Tensor | None:
    """What is left of a norm's weight: itself before a quantized matrix, else nothing."""
    if norm is None or not isinstance(matrix, Tensor):
        return norm
    matrix *= norm
    return None


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
    parts = quantized_parts(config, weights)
    quantized = {id(tensor) for part in parts.values() for tensor in tensors_of(part.whole)}
    for tensor in weights.tensors():
        if id(tensor) in norms:
            tensor.fill_(1.0)
        elif id(tensor) not in quantized:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
    for part in parts.values():
        plain = torch.empty(part.view.shape, dtype=dtype, device=device)
        plain.normal_(0.0, config.initializer_range, generator=generator)
        part.fill(quantize_weight(plain, part.stored.scheme, dtype))
        part.set_input_scale(1.0)
    return with_norms_folded(weights)


def named_views(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """For each tensor name of a Hugging Face checkpoint, the view of the weights it belongs to.

    Without the tensors of quantized layers, which `quantized_parts` describes.
    """
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    for index, layer in enumerate(weights.layers):
        for name, view in _layer_views(config, layer):
            views[f"{_layer_name(index)}.{name}"] = view
    for prefix, stack, matrix in _matrices(config, weights):
        if isinstance(matrix, Tensor):
            for name, rows in zip(stack.names, matrix.split(list(stack.rows)), strict=True):
                views[f"{prefix}{name}.weight"] = rows
    return views


def quantized_parts(config: ModelConfig, weights: Weights) -> dict[str, QuantizedPart]:
    """For each quantized layer of a checkpoint, by name, the part of the weights it belongs to."""
    parts: dict[str, QuantizedPart] = {}
    for prefix, stack, matrix in _matrices(config, weights):
        scheme = None if isinstance(matrix, Tensor) else _scheme(config, prefix, stack)
        if scheme is None or isinstance(matrix, Tensor) or config.quantization is None:
            continue
        start = 0
        for name, rows in zip(stack.names, stack.rows, strict=True):
            stored = StoredLayer(config.quantization.method, scheme, rows, stack.columns)
            parts[f"{prefix}{name}"] = QuantizedPart(stored, matrix, start)
            start += rows
    return parts


def layer_columns(config: ModelConfig) -> dict[str, int]:
    """The inputs of each linear layer of the decoder, by its name in a checkpoint."""
    return {
        f"{_layer_name(index)}.{name}": stack.columns
        for index in range(config.num_layers)
        for stack in _stacks(config).values()
        for name in stack.names
    }


def _matrices(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Stack, LinearWeight]]:
    """Each matrix of projections, with the beginning of their names."""
    for index, layer in enumerate(weights.layers):
        for field, stack in _stacks(config).items():
            yield f"{_layer_name(index)}.", stack, getattr(layer, field)
    if not config.tied_head:
        yield "", _head_stack(config), weights.head


def _layer_views(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer that are no matrices."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if layer.input_norm is not None:
        yield "input_layernorm.weight", layer.input_norm
    if layer.post_norm is not None:
        yield "post_attention_layernorm.weight", layer.post_norm
    if layer.qkv_bias is not None:
        for name, rows in zip("qkv", layer.qkv_bias.split([query, key, key]), strict=True):
            yield f"self_attn.{name}_proj.bias", rows
    if layer.output_bias is not None:
        yield "self_attn.o_proj.bias", layer.output_bias
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
