"""Chooses the cuBLASLt algorithms of a worker's GEMMs, and tiles of experts, by measuring them.

The reference order is that of the skinny kernel, which has the same bits with all its tiles.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.fused_layer import is_fused
from pagewire.worker.ops.contract.quantized import LinearWeight
from pagewire.worker.ops.cublas.gemm import Gemm, choose_algorithms
from pagewire.worker.ops.triton.experts.tuning import choose_tiles
from pagewire.worker.ops.triton.invariant import linear as invariant
from pagewire.worker.ops.triton.invariant.linear_config import any_tokens
from pagewire.worker.ops.triton.linear import linear, linear_add
from pagewire.worker.ops.triton.linear_config import SkinnyConfig, linear_config
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import row_buckets
from pagewire.worker.runtime.graphs.mixed_layout import body_sizes

log = logging.getLogger(__name__)

# Columns of a tile of the reference. A tensor core multiplies 16 at a time.
_MAX_BLOCK_K, _MIN_BLOCK_K = 64, 16


def choose_gemms(decoder: Decoder, limits: Limits, batch_invariant: bool = False) -> None:
    """Measures the GEMMs of the layers, for all row counts of the graphs that cuBLAS computes.

    With `batch_invariant` also those of the head and of layers with biases, and cuBLAS computes
    only what has the bits of the reference order in every row.
    """
    choose = partial(_choose, every_row=batch_invariant)
    layers = decoder.weights.layers
    dense = [layer for layer in layers if layer.router is None]
    tokens = _row_counts(limits)
    config = decoder.config
    add = is_fused(config)  # other layers add to the residual stream in a kernel of its own
    changed = 0
    if add or not config.output_bias:
        changed += choose(_plain(layer.output for layer in layers), tokens, add=add)
    if not config.mlp_bias:
        changed += choose(_plain(layer.down for layer in dense), tokens, add=add)
        changed += choose(_plain(layer.gate_up for layer in dense), tokens)
    changed += choose(_plain(layer.shared_gate_up for layer in layers), tokens)
    changed += choose(_plain(layer.shared_down for layer in layers), tokens)
    if batch_invariant or not config.qkv_bias:
        changed += choose(_plain(layer.qkv for layer in layers), tokens)
    if batch_invariant:
        changed += choose(_plain([decoder.weights.head]), row_buckets(limits))
    log.info("GEMMs of %d sizes use another algorithm than torch chooses", changed)


def choose_expert_tiles(decoder: Decoder, limits: Limits) -> None:
    """Measures the grouped GEMMs of experts, for all row counts of the graphs."""
    experts = decoder.config.experts
    assert experts is not None
    layers = [
        (layer.gate_up, layer.down)
        for layer in decoder.weights.layers
        if isinstance(layer.gate_up, Tensor) and isinstance(layer.down, Tensor)
        if layer.router is not None
    ]
    changed = choose_tiles(layers, experts.top_k, _row_counts(limits), _microseconds)
    log.info("experts have other tiles than the table's for %d numbers of tokens", changed)


def _row_counts(limits: Limits) -> list[int]:
    """All numbers of tokens of the graphs."""
    return sorted({*row_buckets(limits), *(size.tokens for size in body_sizes(limits))})


def _microseconds(run: Callable[[], Tensor]) -> float:
    """The least of three times of `run` on the device."""
    return min(_once(run) for _ in range(3))


def _once(run: Callable[[], Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _plain(weights: Iterable[LinearWeight | None]) -> list[Tensor]:
    """The weights that cuBLAS multiplies by: quantized ones have kernels of their own."""
    return [weight for weight in weights if isinstance(weight, Tensor)]


def _choose(
    weights: Sequence[Tensor],
    tokens: Iterable[int],
    add: bool = False,
    every_row: bool = False,
) -> int:
    """Chooses algorithms for `weights [features, k]`; how many differ from torch's choice."""
    if not weights:
        return 0
    features, k = weights[0].shape
    size = weights[0].element_size()
    left = [count for count in tokens if linear_config(count, features, k, size) is None]
    reference = invariant_order(add) if every_row else in_order(k, add)
    if size != 2 or reference is None:  # other types have no algorithms to choose from
        return 0
    return choose_algorithms(weights, left, add, reference, every_row)


def invariant_order(add: bool) -> Gemm:
    """The GEMM of `--batch-invariant`, for any number of tokens; with `add` it adds to the output.

    It has the bits of `in_order`, and computes what cuBLAS does not.
    """

    def multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        config = any_tokens(len(x), x.shape[1], x.element_size())
        if add:
            return invariant.linear_add(x, weight, out, config=config)
        return invariant.linear(x, weight, out=out, config=config)

    return multiply


def in_order(k: int, add: bool) -> Gemm | None:
    """A GEMM in the reference order, for weights of `k` columns and up to `CHECKED_TOKENS` tokens.

    With `add` it adds to the output. None if 16 does not divide `k`.
    """
    block_k = min(_MAX_BLOCK_K, k & -k)
    if block_k < _MIN_BLOCK_K:
        return None
    config = SkinnyConfig(rows=64, block_k=block_k, warps=4, stages=4)

    def multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        if add:
            return linear_add(x, weight, out, config=config)
        return linear(x, weight, out=out, config=config)

    return multiply
