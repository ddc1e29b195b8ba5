"""Chooses the cuBLASLt algorithms of a worker's GEMMs by measuring them at the start."""

import logging
from collections.abc import Iterable, Sequence

from torch import Tensor

from pagewire.worker.model.decoder import Decoder
from pagewire.worker.ops.cublas.gemm import choose_algorithms
from pagewire.worker.ops.triton.linear_config import linear_config
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import row_buckets
from pagewire.worker.runtime.graphs.mixed_layout import body_sizes

log = logging.getLogger(__name__)


def choose_gemms(decoder: Decoder, limits: Limits) -> None:
    """Measures the GEMMs of the layers, for all row counts of the graphs that cuBLAS computes."""
    weights = decoder.weights
    tokens = sorted({*row_buckets(limits), *(size.tokens for size in body_sizes(limits))})
    changed = _choose([layer.output for layer in weights.layers], tokens, add=True)
    changed += _choose([layer.down for layer in weights.layers], tokens, add=True)
    changed += _choose([layer.gate_up for layer in weights.layers], tokens)
    if not decoder.config.qkv_bias:
        changed += _choose([layer.qkv for layer in weights.layers], tokens)
    log.info("GEMMs of %d sizes use another algorithm than torch chooses", changed)


def _choose(weights: Sequence[Tensor], tokens: Iterable[int], add: bool = False) -> int:
    """Chooses algorithms for `weights [features, k]`; how many differ from torch's choice."""
    features, k = weights[0].shape
    size = weights[0].element_size()
    left = [count for count in tokens if linear_config(count, features, k, size) is None]
    return choose_algorithms(weights, left, add)
