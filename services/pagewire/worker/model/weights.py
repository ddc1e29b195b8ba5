"""The weights of a model on its device. Projections with the same input are one matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are `[out_features, in_features]`; None is absent.

    `qkv` stacks the query, key and value projections, `gate_up` the gate and up projections, in
    this order; an MLP without a gate has only the rows of `up`. A norm's weight scales the columns
    of the next matrix. So `served_weights` multiplies `input_norm` and `post_norm` into that matrix
    where it can, and both exist only while weights are loaded. Experts keep their `post_norm`.
    """

    input_norm: Tensor | None  # [hidden], before attention
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim], or [heads * head_dim] of the whole projection
    k_norm: Tensor | None  # [head_dim], or [kv_heads * head_dim] of the whole projection
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor | None  # [hidden], before the MLP
    # [2 * intermediate, hidden], [intermediate, hidden] without a gate; in a layer with experts
    # [experts, 2 * intermediate, hidden].
    gate_up: Tensor
    down: Tensor  # [hidden, intermediate], with experts [experts, hidden, intermediate]
    input_norm_bias: Tensor | None = None  # [hidden]
    attended_norm: Tensor | None = None  # [hidden], of what attention adds to the residual stream
    post_norm_bias: Tensor | None = None  # [hidden]
    gate_up_bias: Tensor | None = None  # as many as the rows of `gate_up`
    down_bias: Tensor | None = None  # [hidden]
    mlp_norm: Tensor | None = None  # [hidden], of what the MLP adds to the residual stream
    router: Tensor | None = None  # [experts, hidden]; None in a layer without experts
    correction: Tensor | None = None  # [experts] float32, added to the scores that choose
    shared_gate_up: Tensor | None = None  # [2 * intermediate, hidden], of the shared expert
    shared_down: Tensor | None = None  # [hidden, intermediate]
    shared_gate: Tensor | None = None  # [1, hidden]

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
    head: Tensor  # [vocab, hidden]
    norm_bias: Tensor | None = None  # [hidden]

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor once."""
        yield self.embedding
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            yield from (value for value in values if value is not None)
        yield self.norm
        if self.head is not self.embedding:
            yield self.head
        if self.norm_bias is not None:
            yield self.norm_bias

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights with the shapes of the model and undefined values."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(exists: bool, size: int = config.hidden_size) -> Tensor | None:
        return (
            torch.empty(size, dtype=_norm_dtype(config, dtype), device=device) if exists else None
        )

    def vector(exists: bool, size: int = config.hidden_size) -> Tensor | None:
        return empty(size) if exists else None

    def mlp(number: int) -> dict[str, Tensor]:
        experts = config.experts
        if experts is None or not experts.layers[number]:
            return {
                "gate_up": empty(config.gate_up_size, hidden),
                "down": empty(hidden, config.intermediate_size),
            }
        count, inner, shared = experts.count, experts.intermediate_size, experts.shared_size
        matrices = {
            "gate_up": empty(count, 2 * inner, hidden),
            "down": empty(count, hidden, inner),
            "router": empty(count, hidden),
        }
        if experts.scoring == "sigmoid":
            matrices["correction"] = torch.empty(count, dtype=torch.float32, device=device)
        if shared is not None:
            matrices["shared_gate_up"] = empty(2 * shared, hidden)
            matrices["shared_down"] = empty(hidden, shared)
        if experts.shared_gate:
            matrices["shared_gate"] = empty(1, hidden)
        return matrices

    def layer(number: int) -> LayerWeights:
        per_head = config.qk_norm == "head"
        before_mlp = config.block in ("pre", "sandwich")
        behind = config.block in ("post", "sandwich")
        return LayerWeights(
            input_norm=norm(config.block != "post"),
            qkv=empty(config.qkv_size, hidden),
            qkv_bias=vector(config.qkv_bias, config.qkv_size),
            q_norm=norm(config.qk_norm is not None, config.head_dim if per_head else query),
            k_norm=norm(config.qk_norm is not None, config.head_dim if per_head else key),
            output=empty(hidden, query),
            output_bias=vector(config.output_bias),
            post_norm=norm(before_mlp),
            **mlp(number),
            input_norm_bias=vector(config.norm_bias),
            attended_norm=norm(behind),
            post_norm_bias=vector(config.norm_bias and before_mlp),
            gate_up_bias=vector(config.mlp_bias, config.gate_up_size),
            down_bias=vector(config.mlp_bias),
            mlp_norm=norm(behind),
        )

    hidden = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embedding = empty(config.vocab_size, hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.num_layers)),
        norm=torch.empty(hidden, dtype=_norm_dtype(config, dtype), device=device),
        head=embedding if config.tied_head else empty(config.vocab_size, hidden),
        norm_bias=vector(config.norm_bias),
    )


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """float32 for `1 + weight`, which half precision would round near 1."""
    return torch.float32 if config.norm == "rms_plus_one" else dtype


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Weights:
    """Random weights as in a checkpoint, to measure without one: norms are 1, all others normal.

    The standard deviation is `initializer_range` of the configuration. The same seed gives the
    same weights on the same kind of device.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(weights.norm)}
    for layer in weights.layers:
        norms |= {id(norm) for norm in layer.norms()}
    neutral = 0.0 if config.norm == "rms_plus_one" else 1.0
    for tensor in weights.tensors():
        if id(tensor) in norms:
            tensor.fill_(neutral)
        else:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
    return weights
