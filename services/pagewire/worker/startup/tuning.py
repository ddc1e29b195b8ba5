"""Chooses the cuBLASLt algorithms of a worker's GEMMs, and tiles of experts, by measuring them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.fused_layer import is_fused
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops.contract.quantized import GroupedWeight, LinearWeight
from pagewire.worker.ops.cublas.gemm import Gemm, choices, choose_algorithms, use_choices
from pagewire.worker.ops.triton.experts import hopper
from pagewire.worker.ops.triton.experts.tuning import choose_tiles
from pagewire.worker.ops.triton.invariant import linear as invariant
from pagewire.worker.ops.triton.invariant.linear_config import any_tokens
from pagewire.worker.ops.triton.linear_config import linear_config
from pagewire.worker.ops.triton.quantized.linear import WIDEN_ARRANGED_TOKENS
from pagewire.worker.ops.triton.streamed.gemm import is_supported
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import decode_buckets
from pagewire.worker.runtime.graphs.mixed_layout import body_sizes
from pagewire.worker.startup.kernel_record import KernelRecord

log = logging.getLogger(__name__)


def choose_gemms(
    decoders: Sequence[Decoder], limits: Limits, batch_invariant: bool, record: KernelRecord
) -> None:
    """Chooses the algorithms of all GEMMs of a model, and of a draft model, that cuBLAS computes.

    Earlier choices are read from `record`; without them, all are measured and written to it.
    With `batch_invariant` each start measures, because it compares bits on the spot.
    """
    device = decoders[0].weights.embedding.device
    recorded = None if batch_invariant else record.gemms()
    try:
        if recorded is not None and use_choices(recorded, device):
            count = len(recorded["algorithms"])
            log.info("GEMMs of %d sizes use algorithms that an earlier start has measured", count)
            return
        changed = sum(_measure_gemms(decoder, limits, batch_invariant) for decoder in decoders)
        log.info("GEMMs of %d sizes use another algorithm than torch chooses", changed)
        if not batch_invariant:
            record.keep_gemms(choices(device))
    except (OSError, RuntimeError) as error:  # no library, or no memory for the measurement
        log.warning("GEMMs that are not measured yet keep torch's algorithms: %s", error)


def _measure_gemms(decoder: Decoder, limits: Limits, batch_invariant: bool) -> int:
    """Measures the GEMMs of the layers, for all row counts of the graphs that cuBLAS computes.

    Returns the number of sizes whose algorithm is another one than torch's. With `batch_invariant`
    it also measures those of the head and of layers with biases. Then cuBLAS computes only GEMMs
    whose bits equal those of that mode's kernels.
    """
    choose = partial(_choose, batch_invariant=batch_invariant)
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
    changed += choose(_plain(layer.query_up for layer in layers), tokens)
    if batch_invariant or not config.qkv_bias:
        changed += choose(_plain(layer.qkv for layer in layers), tokens)
    if batch_invariant:
        changed += choose(_plain([decoder.weights.head]), decode_buckets(limits))
    widened = [count for count in tokens if count >= WIDEN_ARRANGED_TOKENS]
    for weight, is_added in _arranged(layers) if widened else ():
        # Without the weight's own values, which a kernel would have to be compiled for.
        wide = weight.scales.new_empty(weight.shape).normal_(0.0, 0.02)
        changed += _choose([wide], widened, is_added)
    return changed


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
    counts = _row_counts(limits)
    if layers and not experts.bias and experts.clamp is None:
        counts = [count for count in counts if not _on_hopper(layers[0], count * experts.top_k)]
    changed = choose_tiles(layers, experts.top_k, counts, _microseconds)
    log.info("experts have other tiles than the table's for %d numbers of tokens", changed)


def _on_hopper(weights: Iterable[Tensor], pairs: int) -> bool:
    """Whether Hopper's kernel, whose tiles are fixed, computes both products of experts."""
    return all(hopper.is_supported(weight.dtype, weight, pairs) for weight in weights)


def _row_counts(limits: Limits) -> list[int]:
    """All numbers of tokens of the graphs."""
    return sorted({*decode_buckets(limits), *(size.tokens for size in body_sizes(limits))})


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


def _arranged(layers: Iterable[LayerWeights]) -> Iterator[tuple[GroupedWeight, bool]]:
    """One arranged weight of each shape, and whether its products are added to the residual."""
    seen = set()
    for layer in layers:
        for field in fields(layer):
            weight, is_added = getattr(layer, field.name), field.name in ("output", "down")
            if not isinstance(weight, GroupedWeight) or weight.pairs is None:
                continue
            if (weight.shape, is_added) not in seen:
                seen.add((weight.shape, is_added))
                yield weight, is_added


def _choose(
    weights: Sequence[Tensor],
    tokens: Iterable[int],
    add: bool = False,
    batch_invariant: bool = False,
) -> int:
    """Chooses algorithms for `weights [features, k]`; returns the number unlike torch's choice."""
    if not weights:
        return 0
    features, k = weights[0].shape
    size = weights[0].element_size()
    if size != 2:  # other types have no algorithms to choose from
        return 0
    left = [
        count
        for count in tokens
        if linear_config(count, features, k, size) is None and not is_supported(count, weights[0])
    ]
    reference = invariant_order(add) if batch_invariant else None
    return choose_algorithms(weights, left, add, reference)


def invariant_order(add: bool) -> Gemm:
    """The GEMM of `--batch-invariant`, for any number of tokens; with `add` it adds to the output.

    It computes the GEMMs that cuBLAS does not.
    """

    def multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        config = any_tokens(len(x), x.shape[1], x.element_size())
        if add:
            return invariant.linear_add(x, weight, out, config=config)
        return invariant.linear(x, weight, out=out, config=config)

    return multiply
