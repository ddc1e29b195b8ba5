"""Runs a model over texts, a layer at a time, and records the inputs of each layer's matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.decoder import Batch, Decoder, Prefill
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops import Ops, load_ops
from pagewire.worker.ops.contract.quantized import (
    QuantizedInput,
    QuantizedWeight,
    ScaledWeight,
)

# Tokens of a sequence.
LENGTH = 512
_BLOCK_SIZE = 16
_CPU = torch.device("cpu")


def read_sequences(texts: Path, folder: Path, longest: int, vocab_size: int) -> list[list[int]]:
    """The tokens of a UTF-8 text file, by the tokenizer of a model, cut into sequences.

    A sequence has `LENGTH` tokens, or `longest` if that is less.

    Raises:
        SetupError: the file has no text, or there is no tokenizer with at most `vocab_size` ids.
    """
    try:
        text = texts.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(tokenizer_file(folder)))
    except (OSError, ValueError) as error:
        raise SetupError(f"--calibrate {texts}: {error}") from error
    ids: list[int] = tokenizer.encode(text).ids
    if not ids:
        raise SetupError(f"--calibrate {texts}: the file is empty; give some pages of text")
    if max(ids) >= vocab_size:
        raise SetupError(
            f"--calibrate {texts}: the tokenizer in {folder} turns it into the id {max(ids)}, "
            f"which is outside the model's vocabulary of {vocab_size} ids; put the model's own "
            "tokenizer there"
        )
    length = min(LENGTH, longest)
    return [ids[begin : begin + length] for begin in range(0, len(ids), length)]


def layer_inputs(folder: Path, sequences: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    """The products `x.T @ x` of the inputs of each layer's matrices, from the first layer on.

    The keys of each dict are the names of `layer_stacks`, the values `[columns, columns]` float32.
    The model must be quantized.
    """
    config = read_model_config(folder)
    weights = load_weights(folder, config, torch.float32, _CPU)
    tables = rope_tables(config, max(map(len, sequences)), _CPU)
    # Embedded tokens are scaled here, and not again before each layer.
    states = [weights.embedding[ids] * config.embedding_multiplier for ids in sequences]
    for layer in range(config.num_layers):
        squares: dict[str, Tensor] = {}
        decoder = Decoder(
            replace(config.with_layers((layer,)), embedding_multiplier=1.0),
            replace(weights, layers=(weights.layers[layer],)),
            _recording_ops(weights.layers[layer], squares),
            (tables[layer],),
        )
        for state in states:
            _run_layer(decoder, state)
        yield squares


def _run_layer(decoder: Decoder, state: Tensor) -> None:
    """Adds the only layer of `decoder` to `state [tokens, hidden]`, those of one sequence."""
    count = len(state)
    blocks = -(-count // _BLOCK_SIZE)
    cache = empty_cache(decoder.config, 1 + blocks, _BLOCK_SIZE, torch.float32, _CPU)
    positions = torch.arange(count, dtype=torch.int32)
    slots = torch.zeros(count, dtype=torch.int32)
    ends = torch.tensor([0, count], dtype=torch.int32)
    batch = Batch(
        token_ids=slots,  # not read: `state` is embedded already
        positions=positions,
        slots=slots,
        num_decodes=0,
        decode_lengths=slots[:0],
        prefill=Prefill(slots[:1], ends, ends[1:], count),
    )
    table = torch.arange(1, 1 + blocks, dtype=torch.int32)[None]
    decoder.layers(state, batch, cache, table)


def _recording_ops(layer: LayerWeights, squares: dict[str, Tensor]) -> Ops:
    """The reference operations, which also add the inputs of a layer's matrices to `squares`."""
    ops = load_ops("torch")
    names = {id(getattr(layer, field.name)): field.name for field in fields(layer)}

    def record(x: Tensor | QuantizedInput, weight: QuantizedWeight) -> None:
        if isinstance(x, QuantizedInput):
            x = x.values.float() * x.scales  # one scale a token
        name, found = names[id(weight)], x.t() @ x
        squares[name] = squares[name].add_(found) if name in squares else found

    def recorded(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record_and_multiply(
            x: Tensor | QuantizedInput, weight: QuantizedWeight, *rest: Tensor | None
        ) -> Tensor:
            record(x, weight)
            return product(x, weight, *rest)

        return record_and_multiply

    kinds = (
        "grouped_linear",
        "grouped_linear_add",
        "scaled_linear",
        "scaled_linear_add",
    )
    recording = {name: recorded(getattr(ops, name)) for name in kinds}
    scaled, scaled_add = recording["scaled_linear"], recording["scaled_linear_add"]

    def norm_quantize_linear(
        x: Tensor, norm: Tensor | None, eps: float, weight: ScaledWeight, *rest: Tensor | None
    ) -> Tensor:
        return scaled(ops.norm_quantize(x, norm, eps, weight.input_format), weight, *rest)

    def quantize_linear_add(x: Tensor, weight: ScaledWeight, residual: Tensor) -> Tensor:
        return scaled_add(ops.quantize(x, weight.input_format), weight, residual)

    def norm_quantize_swiglu_add(
        residual: Tensor,
        norm: Tensor | None,
        eps: float,
        gate_up: ScaledWeight,
        down: ScaledWeight,
    ) -> Tensor:
        both = norm_quantize_linear(residual, norm, eps, gate_up)
        return scaled_add(ops.silu_mul_quantize(both, down.input_format), down, residual)

    fused = (norm_quantize_linear, quantize_linear_add, norm_quantize_swiglu_add)
    recording |= {function.__name__: function for function in fused}
    return cast(Ops, SimpleNamespace(**(vars(ops) | recording)))
