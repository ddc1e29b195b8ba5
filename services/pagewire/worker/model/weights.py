"""The weights of a model on its device. Projections with the same input are one matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.quantization.parts import QuantizedPart, empty_stacked
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.stored import StoredLayer
from pagewire.worker.model.stacks import Stack, head_stack, layer_name, layer_stacks, scheme_of
from pagewire.worker.ops.contract.quantized import LinearWeight, tensors_of


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are `[out_features, in_features]`; None is absent.

    `qkv` stacks the query, key and value projections, `gate_up` the gate and up projections, in
    this order; an MLP without a gate has only the rows of `up`. A norm's weight scales the columns
    of the next matrix. So `served_weights` multiplies `input_norm` and `post_norm` into that matrix
    where possible; then both exist only while weights are loaded. Experts and quantized matrices
    keep the norm before them.

    With latent attention, `qkv` stacks two projections: that of queries or compressed queries, and
    that of the latent vector and the rotated key. `q_norm` belongs to compressed queries, `k_norm`
    to latent vectors.
    """

    input_norm: Tensor | None  # [hidden], before attention
    qkv: LinearWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim], or [heads * head_dim] of the whole projection
    k_norm: Tensor | None  # [head_dim], or [kv_heads * head_dim] of the whole projection
    output: LinearWeight  # [hidden, heads * head_dim]
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor | None  # [hidden], before the MLP
    # [2 * intermediate, hidden], [intermediate, hidden] without a gate; in a layer with experts
    # [experts, 2 * intermediate, hidden], or [experts * 2 * intermediate, hidden] if quantized.
    gate_up: LinearWeight
    down: LinearWeight  # [hidden, intermediate], with experts as above
    input_norm_bias: Tensor | None = None  # [hidden]
    attended_norm: Tensor | None = None  # [hidden], of the output of attention
    post_norm_bias: Tensor | None = None  # [hidden]
    gate_up_bias: Tensor | None = None  # a value for each row of `gate_up`
    down_bias: Tensor | None = None  # [hidden], with experts [experts, hidden]
    mlp_norm: Tensor | None = None  # [hidden], of the output of the MLP
    router: Tensor | None = None  # [experts, hidden]; None in a layer without experts
    correction: Tensor | None = None  # [experts] float32, added to the scores that choose
    shared_gate_up: LinearWeight | None = None  # [2 * intermediate, hidden], of the shared expert
    shared_down: LinearWeight | None = None  # [hidden, intermediate]
    shared_gate: Tensor | None = None  # [1, hidden]
    # Only with latent attention; see `LatentConfig` for the sizes.
    query_up: LinearWeight | None = None  # [heads * query_dim, query_rank], from compressed queries
    # [heads * (plain_dim + value_dim), rank], for each head the rows of keys, then those of values
    kv_up: LinearWeight | None = None
    router_bias: Tensor | None = None  # [experts]
    sinks: Tensor | None = None  # [heads], of attention

    def norms(self) -> tuple[Tensor | None, ...]:
        """The weights of all norms."""
        return (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.attended_norm,
            self.post_norm,
            self.mlp_norm,
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. `head` is the tensor `embedding` if the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]
    norm_bias: Tensor | None = None  # [hidden]

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor once."""
        yield self.embedding
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            for value in values:
                yield from [] if value is None else tensors_of(value)
        yield self.norm
        if self.head is not self.embedding:
            yield from tensors_of(self.head)
        if self.norm_bias is not None:
            yield self.norm_bias

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights with the shapes of the model and undefined values.

    Raises:
        SetupError: projections with the same input are quantized differently.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(exists: bool, size: int = config.hidden_size) -> Tensor | None:
        return (
            torch.empty(size, dtype=_norm_dtype(config, dtype), device=device) if exists else None
        )

    def vector(exists: bool, size: int = config.hidden_size) -> Tensor | None:
        return empty(size) if exists else None

    def matrix(prefix: str, stack: Stack) -> LinearWeight:
        scheme = scheme_of(config, prefix, stack)
        if scheme is None and stack.experts:
            return empty(stack.experts, sum(stack.rows) // stack.experts, stack.columns)
        if scheme is None:
            return empty(sum(stack.rows), stack.columns)
        return empty_stacked(scheme, stack.rows, stack.columns, dtype, device)

    def projections(number: int) -> dict[str, LinearWeight]:
        stacks = layer_stacks(config, number)
        return {name: matrix(layer_name(config, number), stack) for name, stack in stacks.items()}

    def beside_experts(number: int) -> dict[str, Tensor]:
        experts = config.experts
        if experts is None or not experts.layers[number]:
            return {}
        count = experts.count
        matrices = {"router": empty(count, hidden)}
        if experts.scoring == "sigmoid":
            matrices["correction"] = torch.empty(count, dtype=torch.float32, device=device)
        if experts.shared_gate:
            matrices["shared_gate"] = empty(1, hidden)
        if experts.bias:
            matrices["router_bias"] = empty(count)
            matrices["gate_up_bias"] = empty(count, 2 * experts.intermediate_size)
            matrices["down_bias"] = empty(count, hidden)
        return matrices

    def mlp_biases() -> dict[str, Tensor]:
        if not config.mlp_bias:
            return {}
        return {"gate_up_bias": empty(config.gate_up_size), "down_bias": empty(hidden)}

    def layer(number: int) -> LayerWeights:
        q_normed, k_normed = _normed_sizes(config)
        before_mlp = config.block in ("pre", "sandwich")
        behind = config.block in ("post", "sandwich")
        matrices = projections(number)
        return LayerWeights(
            qkv=matrices["qkv"],
            output=matrices["output"],
            gate_up=matrices["gate_up"],
            down=matrices["down"],
            input_norm=norm(config.block != "post"),
            qkv_bias=vector(config.qkv_bias, config.qkv_size),
            q_norm=norm(q_normed > 0, q_normed),
            k_norm=norm(k_normed > 0, k_normed),
            output_bias=vector(config.output_bias),
            post_norm=norm(before_mlp),
            input_norm_bias=vector(config.norm_bias),
            attended_norm=norm(behind),
            post_norm_bias=vector(config.norm_bias and before_mlp),
            mlp_norm=norm(behind),
            sinks=vector(config.attention_sinks, config.num_heads),
            shared_gate_up=matrices.get("shared_gate_up"),
            shared_down=matrices.get("shared_down"),
            **(mlp_biases() | beside_experts(number)),
            query_up=matrices.get("query_up"),
            kv_up=matrices.get("kv_up"),
        )

    hidden = config.hidden_size
    embedding = empty(config.vocab_size, hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.num_layers)),
        norm=torch.empty(hidden, dtype=_norm_dtype(config, dtype), device=device),
        head=embedding if config.tied_head else matrix("", head_stack(config)),
        norm_bias=vector(config.norm_bias),
    )


def _normed_sizes(config: ModelConfig) -> tuple[int, int]:
    """The sizes of the norms of queries and of keys; 0 for no norm."""
    if config.latent is not None:
        return config.latent.query_rank or 0, config.latent.rank
    if config.qk_norm is None:
        return 0, 0
    if config.qk_norm == "head":
        return config.head_dim, config.head_dim
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """float32 for `1 + weight`, which half precision would round near 1."""
    return torch.float32 if config.norm == "rms_plus_one" else dtype


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
        norms |= {id(norm) for norm in layer.norms()}
    neutral = 0.0 if config.norm == "rms_plus_one" else 1.0
    parts = quantized_parts(config, weights)
    quantized = {id(tensor) for part in parts.values() for tensor in tensors_of(part.whole)}
    for tensor in weights.tensors():
        if id(tensor) in norms:
            tensor.fill_(neutral)
        elif id(tensor) not in quantized:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
    for part in parts.values():
        plain = torch.empty(part.view.shape, dtype=dtype, device=device)
        plain.normal_(0.0, config.initializer_range, generator=generator)
        part.fill(quantize_weight(plain, part.stored.scheme, dtype))
        part.set_input_scale(1.0)
    return weights


def quantized_parts(config: ModelConfig, weights: Weights) -> dict[str, QuantizedPart]:
    """For each quantized layer of a checkpoint, by name, the part of the weights that it fills."""
    parts: dict[str, QuantizedPart] = {}
    for prefix, stack, matrix in _matrices(config, weights):
        scheme = None if isinstance(matrix, Tensor) else scheme_of(config, prefix, stack)
        if scheme is None or isinstance(matrix, Tensor) or config.quantization is None:
            continue
        start = 0
        for name, rows in zip(stack.names, stack.rows, strict=True):
            stored = StoredLayer(
                config.quantization.method,
                scheme,
                rows,
                stack.columns,
                stack.experts,
                stack.in_turns,
            )
            parts[f"{prefix}{name}"] = QuantizedPart(stored, matrix, start)
            start += rows
    return parts


def _matrices(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Stack, LinearWeight]]:
    """Each matrix of projections, with the beginning of their names."""
    for number, layer in enumerate(weights.layers):
        for field, stack in layer_stacks(config, number).items():
            yield layer_name(config, number), stack, getattr(layer, field)
    if not config.tied_head:
        yield "", head_stack(config), weights.head
