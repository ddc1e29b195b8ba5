"""The kernel of QK norm, RoPE and KV write stores FP8 caches as its reference does."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.test_rope import BLOCK_SIZE, HEADS, TOKENS, make_arguments
from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.reference import rope as reference
from pagewire.worker.ops.triton import rope
from pagewire.worker.ops.triton.invariant import ops as invariant
from pagewire.worker.ops.triton.rope import RopeKernelConfig
from support.kernels.comparison import DTYPES, TOLERANCE, assert_near, poisoned_outputs
from support.kernels.fp8_cache import NAN_BITS, quantized, widened


def empty_caches(arguments: tuple, heads: tuple[int, int, int]) -> tuple[list[Tensor], KVScales]:
    """Caches and scales full of NaN, so that wrong and missing writes are found."""
    tables = arguments[-1]
    shape = (1 + tables.numel(), heads[1], BLOCK_SIZE, heads[2])
    caches = [
        torch.full(shape, NAN_BITS, dtype=torch.uint8, device=tables.device) for _ in range(2)
    ]
    scales = KVScales(*torch.full((2, *shape[:3]), torch.nan, device=tables.device))
    return [cache.view(torch.float8_e4m3fn) for cache in caches], scales


def written(
    module: ModuleType, arguments: tuple, heads: tuple[int, int, int], **options: Any
) -> tuple[Tensor, list[Tensor], KVScales]:
    caches, scales = empty_caches(arguments, heads)
    with poisoned_outputs():
        q = module.qk_norm_rope_kv_write(*arguments, *caches, scales=scales, **options)
    return q, caches, scales


def compare(
    arguments: tuple, heads: tuple[int, int, int], dtype: torch.dtype, **options: Any
) -> None:
    unscaled = {k: v for k, v in options.items() if k == "unscaled"}
    q, caches, scales = written(rope, arguments, heads, **options)
    expected, wanted, wanted_scales = written(reference, arguments, heads, **unscaled)
    assert_near(q, expected, TOLERANCE[dtype])
    pairs = ((scales.keys, wanted_scales.keys), (scales.values, wanted_scales.values))
    for cache, wanted_cache, (scale, wanted_scale) in zip(caches, wanted, pairs, strict=True):
        assert torch.equal(scale.isnan(), wanted_scale.isnan())
        assert_near(scale.nan_to_num(), wanted_scale.nan_to_num(), 1e-6)
        assert torch.equal(cache.float().isnan(), wanted_cache.float().isnan())
        # A float32 that lies between two FP8 numbers may be rounded to either.
        differ = cache.view(torch.uint8) != wanted_cache.view(torch.uint8)
        assert differ.sum() <= 1 + differ.numel() // 200
        assert_near(widened(cache, scale), widened(wanted_cache, wanted_scale), 5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_the_reference(tokens, heads, dtype, device):
    compare(make_arguments(tokens, heads, dtype, device), heads, dtype)


@pytest.mark.parametrize("config", [RopeKernelConfig(2, 8, 2), RopeKernelConfig(4, 2, 4)], ids=str)
def test_tiles_and_late_norms(config, device):
    heads, dtype = (5, 3, 32), torch.float16
    arguments = make_arguments(11, heads, dtype, device, (False, True))
    compare(arguments, heads, dtype, config=config)
    x = (3 * torch.randn(11, 64, device=device)).to(dtype)
    compare(arguments, heads, dtype, config=config, unscaled=x)


@pytest.mark.parametrize("module", [reference, rope, invariant])
def test_values_are_rounded_to_the_nearest_with_the_largest_at_the_largest(module, device):
    """Values are not rotated: independent code yields the same FP8 numbers and scales."""
    heads, dtype = (4, 2, 64), torch.float32
    arguments = make_arguments(9, heads, dtype, device)
    qkv, *_, positions, slots, tables = arguments
    values = qkv.view(9, 8, 64)[:, 6:]
    values[0] *= 1e-30
    values[1] *= 1e30
    values[2, 0] = 0.0
    values[3, 1] = 2.0**-149  # the smallest float32
    _, (_, cache), scales = written(module, arguments, heads)
    blocks, rows = tables[slots.long(), positions.long() // BLOCK_SIZE].long(), positions.long()
    numbers, scale = quantized(values[:, :, None])
    found = cache.view(torch.uint8)[blocks, :, rows % BLOCK_SIZE]
    assert torch.equal(scales.values[blocks, :, rows % BLOCK_SIZE], scale[:, :, 0])
    differ = found != numbers.view(torch.uint8)[:, :, 0]
    assert differ.sum() <= 2  # of 1,152 values: float32 quotients between two FP8 numbers
    largest = (found & NAN_BITS).amax(-1)  # bits of magnitudes have their order
    assert largest[2, 0] == 0
    assert largest[3, 1] == 0
    largest[2, 0] = largest[3, 1] = 0x7E
    assert (largest == 0x7E).all(), "448 is the largest number of each vector"


@pytest.mark.parametrize("module", [reference, rope])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(module, bad, device):
    """So that attention to it fails its sequence, instead of returning a wrong answer."""
    heads = (4, 2, 64)
    arguments = make_arguments(5, heads, torch.float32, device, (False, False))
    qkv, *_, positions, slots, tables = arguments
    qkv.view(5, 8, 64)[3, 4:, 7] = bad
    _, caches, scales = written(module, arguments, heads)
    block = tables[slots[3].long(), positions[3].long() // BLOCK_SIZE].long()
    for cache, scale in zip(caches, (scales.keys, scales.values), strict=True):
        wide = cache.float() * scale[..., None]
        assert not wide[block, :, positions[3] % BLOCK_SIZE].isfinite().all(-1).any()
    for token in (0, 1, 2, 4):
        block = tables[slots[token].long(), positions[token].long() // BLOCK_SIZE].long()
        row = positions[token] % BLOCK_SIZE
        for cache, scale in zip(caches, (scales.keys, scales.values), strict=True):
            assert (cache.float() * scale[..., None])[block, :, row].isfinite().all()
