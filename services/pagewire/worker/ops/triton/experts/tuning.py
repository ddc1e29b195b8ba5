"""Measures which tiles of the grouped GEMMs are the fastest for each number of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.triton.experts.config import (
    GEMM_TABLE,
    LARGEST,
    GemmConfig,
    keep_config,
    table_config,
)
from pagewire.worker.ops.triton.experts.projections import experts_down, experts_gate_up_silu_mul
from pagewire.worker.ops.triton.experts.rows import sort_by_expert

log = logging.getLogger(__name__)

# Tiles replace those of the table if the table's take at least this many times as long.
MARGIN = 1.02
# Layers whose GEMMs are timed together, so that no weight is read from the L2 cache.
MAX_LAYERS = 4
# Errors of a configuration that does not fit the device.
UNFIT = (triton.runtime.errors.OutOfResources, RuntimeError)

LayerGemms = tuple[Tensor, Tensor]  # weights of gate and up, and of down, as in `ExpertOps`
Timer = Callable[[Callable[[], Tensor]], float]


def choose_tiles(
    layers: Sequence[LayerGemms], top_k: int, tokens: Sequence[int], microseconds: Timer
) -> int:
    """Measure both GEMMs of layers with experts and keep the fastest tiles of each size.

    Only tiles with the bits of the table's are considered.

    Args:
        layers: the weights of each layer, all of the same shapes.
        top_k: experts of a token.
        tokens: the numbers of tokens to measure; experts are drawn at random.
        microseconds: times a function, which has run once before.

    Returns:
        The number of sizes for which other tiles than the table's were chosen.
    """
    num_experts, changed = layers[0][0].shape[0], 0
    for count in sorted(tokens):
        usual = table_config(count * top_k, num_experts)
        fastest = _fastest(layers[:MAX_LAYERS], top_k, count, usual, microseconds)
        if fastest != usual:
            keep_config(count * top_k, num_experts, fastest)
            changed += 1
    return changed


def _fastest(
    layers: Sequence[LayerGemms], top_k: int, tokens: int, usual: GemmConfig, microseconds: Timer
) -> GemmConfig:
    """Return the fastest tiles for `tokens` tokens: `usual` unless others are clearly faster."""
    num_experts, _, hidden = layers[0][0].shape
    x = layers[0][0].new_empty((tokens, hidden)).normal_()
    scores = torch.rand(tokens, num_experts, device=x.device)
    experts = scores.argsort(1)[:, :top_k].int().contiguous()

    def compute(config: GemmConfig) -> tuple[Tensor, ExpertRows]:
        rows = sort_by_expert(experts, num_experts, tile=config.tile)
        for gate_up, down in layers:
            gated = experts_gate_up_silu_mul(x, gate_up, rows, config=config)
            parts = experts_down(gated, down, rows, config=config)
        return parts, rows

    def by_pair(config: GemmConfig) -> Tensor:
        parts, rows = compute(config)
        return parts[rows.rows]

    def run(config: GemmConfig) -> Tensor:
        return compute(config)[0]

    expected = by_pair(usual)
    times = {usual: microseconds(partial(run, usual)) / MARGIN}
    for config in candidates(usual):
        try:
            if torch.equal(by_pair(config), expected):  # this compiles the kernels, too
                times[config] = microseconds(partial(run, config))
        except UNFIT as error:
            log.debug("%s does not fit the device: %s", config, error)
    return min(times, key=times.__getitem__)


def candidates(usual: GemmConfig) -> list[GemmConfig]:
    """Return the tiles to try instead of `usual`: neighbours in the table, and variants of them."""
    table = [*(config for _, config in GEMM_TABLE), LARGEST]
    place = table.index(usual)
    variants = dict.fromkeys(
        replace(config, rows=rows, stages=stages)
        for config in table[max(0, place - 1) : place + 2]
        for rows in (config.rows, 2 * config.rows)
        for stages in (config.stages, config.stages - 1)
    )
    return [variant for variant in variants if variant != usual]
