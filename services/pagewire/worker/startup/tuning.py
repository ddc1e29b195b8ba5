"""Chooses the cuBLASLt algorithms of a worker's GEMMs by measuring them at the start.

The reference order is that of the skinny kernel, which has the same bits with all its tiles.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from pagewire.worker.model.decoder import Decoder
from pagewire.worker.ops.cublas.gemm import Gemm, choose_algorithms
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
    weights, config = decoder.weights, decoder.config
    choose = partial(_choose, every_row=batch_invariant)
    rows = row_buckets(limits)
    tokens = sorted({*rows, *(size.tokens for size in body_sizes(limits))})
    changed = choose([layer.output for layer in weights.layers], tokens, add=True)
    changed += choose([layer.down for layer in weights.layers], tokens, add=True)
    changed += choose([layer.gate_up for layer in weights.layers], tokens)
    if batch_invariant or not config.qkv_bias:
        changed += choose([layer.qkv for layer in weights.layers], tokens)
    if batch_invariant:
        changed += choose([weights.head], rows)
    log.info("GEMMs of %d sizes use another algorithm than torch chooses", changed)


def _choose(
    weights: Sequence[Tensor],
    tokens: Iterable[int],
    add: bool = False,
    every_row: bool = False,
) -> int:
    """Chooses algorithms for `weights [features, k]`; how many differ from torch's choice."""
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
