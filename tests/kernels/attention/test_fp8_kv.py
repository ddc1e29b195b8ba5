"""Attention from a KV cache in FP8: the kernels, their references, and the error of FP8."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.test_attention import (
    BLOCK_SIZE,
    CHUNKS,
    HEADS,
    LENGTHS,
    OPTIONS,
    Cache,
    make_cache,
    with_sinks,
)
from kernels.attention.test_shared_prefix import GROUPS, groups_of, int32
from pagewire.worker.ops.reference import attention as reference
from pagewire.worker.ops.triton import attention
from pagewire.worker.ops.triton.attention.decode import DecodeConfig, LongShares, decode_config
from pagewire.worker.ops.triton.attention.prefill import PrefillConfig
from pagewire.worker.runtime.prefix_groups import ItemSizes, item_views, pack_items
from support.kernels.comparison import (
    CUDA,
    DTYPES,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)
from support.kernels.fp8_cache import quantized, quantized_pair, widened

# The interpreter is slow.
FEW_HEADS = HEADS if CUDA else HEADS[1:4]


def wide_pair(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return widened(*quantized(k)), widened(*quantized(v))


def compare_decode(
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: DecodeConfig | None = None,
    block_size: int = BLOCK_SIZE,
    size: float = 1.0,
    **options: float,
) -> None:
    query_heads, kv_heads, head_dim = heads
    options = with_sinks(options, query_heads, device)
    cache = make_cache(lengths, kv_heads, head_dim, torch.float32, device, block_size)
    k, v, scales = quantized_pair(cache.k, size * cache.v)
    q = torch.randn(len(lengths), query_heads, head_dim, device=device).to(dtype)
    arguments = (cache.tables, cache.slots, cache.lengths, head_dim**-0.5)
    with poisoned_outputs():
        out = attention.decode_attention(
            q, k, v, *arguments, scales=scales, config=config, **options
        )
    expected = reference.decode_attention(
        q.float(), *wide_pair(cache.k, size * cache.v), *arguments, **options
    )
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


def compare_prefill(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: PrefillConfig | None = None,
    **options: float,
) -> None:
    query_heads, kv_heads, head_dim = heads
    options = with_sinks(options, query_heads, device)
    counts = [count for count, _ in chunks]
    starts = int32([*accumulate(counts, initial=2)], device)
    cache = make_cache([n for _, n in chunks], kv_heads, head_dim, torch.float32, device)
    k, v, scales = quantized_pair(cache.k, cache.v)
    q = torch.randn(2 + sum(counts) + 3, query_heads, head_dim, device=device).to(dtype)
    arguments = (cache.tables, cache.slots, starts, cache.lengths, head_dim**-0.5, max(counts))
    out = torch.full_like(q, torch.nan)
    out[:2] = 7
    attention.prefill_attention(
        q, k, v, *arguments, scales=scales, out=out, config=config, **options
    )
    expected = reference.prefill_attention(
        q.float(), *wide_pair(cache.k, cache.v), *arguments, **options
    )
    expected[:2] = 7
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", FEW_HEADS, ids=str)
def test_decode(heads, dtype, device):
    compare_decode([*LENGTHS, 0], heads, dtype, device)
    compare_decode([100], heads, dtype, device)


@pytest.mark.parametrize("programs", [1, 3])
def test_decode_cut_into_many_shares(programs, device):
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=programs, share=16)
    compare_decode([0, 70, 0, 16, 3], (6, 2, 32), torch.float16, device, config)
    compare_decode([50, 7], (6, 2, 32), torch.float16, device, config, block_size=48)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [0, 70, 0, 130, 3, 0]], ids=str)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7}, {"sinks": 2.0}], ids=str)
def test_decode_in_long_shares(lengths, options, device):
    config = DecodeConfig(tile=16, warps=1, stages=2, programs=3, share=16)
    config = replace(config, long=LongShares(32, stages=3, share=0))
    for size in (1e-3, 1.0, 1e3):
        compare_decode(lengths, (6, 2, 32), torch.float16, device, config, size=size, **options)


@pytest.mark.parametrize("lengths", [[96], [50, 0, 30]], ids=str)
def test_short_shares_keep_their_loop(lengths, device):
    heads, kv_heads, head_dim = (8, 2, 128) if CUDA else (4, 2, 32)
    cache = make_cache(lengths, kv_heads, head_dim, torch.float32, device)
    k, v, scales = quantized_pair(cache.k, cache.v)
    q = torch.randn(len(lengths), heads, head_dim, device=device).bfloat16()
    arguments = (q, k, v, cache.tables, cache.slots, cache.lengths, 0.2)
    usual = DecodeConfig(tile=16, warps=1, stages=2, programs=8, share=32)
    config = replace(usual, long=LongShares(32, stages=3, share=10_000))
    expected = attention.decode_attention(*arguments, scales=scales, config=usual)
    out = attention.decode_attention(*arguments, scales=scales, config=config)
    assert torch.equal(out, expected)


@pytest.mark.skipif(not FULL_SIZE, reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("lengths", [[120_000], [60_000, 60_000], [100, 90_001]], ids=str)
@pytest.mark.parametrize("loop", [None, (16, 4), (32, 2), (32, 3), (64, 2)], ids=str)
def test_decode_of_long_sequences(lengths, loop, device):
    config = decode_config(torch.bfloat16, 128, 4, len(lengths), fp8=True)
    if loop is not None:
        config = replace(config, long=LongShares(*loop, share=64))
    compare_decode(lengths, (32, 8, 128), torch.bfloat16, device, config)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_the_size_of_values_costs_no_precision(size, device):
    """In float16 probabilities times scales neither vanish nor overflow."""
    compare_decode([300, 90], (4, 2, 32), torch.float16, device, size=size)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_with_options(options, device):
    compare_decode([*LENGTHS, 0, 64, 65], (4, 2, 32), torch.float16, device, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", FEW_HEADS, ids=str)
def test_prefill(heads, dtype, device):
    compare_prefill([*CHUNKS, (0, 0)], heads, dtype, device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefill_with_options(options, device):
    chunks = [*CHUNKS, (70, 70), (20, 90)]
    compare_prefill(chunks, (4, 2, 32), torch.float16, device, **options)
    config = PrefillConfig(16, 16, 4, 2)
    compare_prefill(chunks, (4, 2, 32), torch.float16, device, config, **options)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7}, {"window": 70}], ids=str)
@pytest.mark.parametrize("case", ["nested", "alike"])
def test_shared_prefixes_change_nothing(case, options, device):
    (query_heads, kv_heads, head_dim), dtype = (4, 2, 32), torch.float16
    groups, lengths, _ = GROUPS[case]
    rows = len(lengths)
    torch.manual_seed(rows)
    columns = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.zeros(rows + 1, columns, dtype=torch.int32)
    tables[:rows] = 1 + torch.randperm(rows * columns).view(rows, columns)
    for members, blocks in groups:
        tables[members, :blocks] = tables[members[0], :blocks]
    cache = torch.randn(2, rows * columns + 1, kv_heads, BLOCK_SIZE, head_dim, device=device)
    k, v, scales = quantized_pair(*cache)
    slots = np.arange(rows, dtype=np.int32)
    sharing = ItemSizes(
        limits=attention.shared_prefix_limits(dtype, head_dim, query_heads // kv_heads),
        kv_heads=kv_heads,
        processors=132 if CUDA else 1,
        block_size=BLOCK_SIZE,
    )
    packed = torch.from_numpy(pack_items(groups_of(*groups), slots, rows, sharing))
    shared = item_views(packed.to(device), rows)
    assert shared.num_items.item() > 0
    q = torch.randn(rows, query_heads, head_dim, device=device).to(dtype)
    arguments = (tables.to(device), int32(slots, device), int32(lengths, device), head_dim**-0.5)
    with poisoned_outputs():
        out = attention.decode_attention(
            q, k, v, *arguments, scales=scales, shared=shared, **options
        )
    expected = reference.decode_attention(q.float(), *wide_pair(*cache), *arguments, **options)
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_the_references_attend_to_the_widened_cache(options, device):
    options = with_sinks(options, 6, device)
    cache = make_cache(LENGTHS, 2, 32, torch.float32, device)
    k, v = torch.nan_to_num(cache.k), torch.nan_to_num(cache.v)
    given, wide = quantized_pair(k, v), wide_pair(k, v)
    scales = {"scales": given[2]}
    q = torch.randn(len(LENGTHS), 6, 32, device=device).bfloat16()
    arguments = (cache.tables, cache.slots, cache.lengths, 0.2)
    out = reference.decode_attention(q, *given[:2], *arguments, **scales, **options)
    expected = reference.decode_attention(q.float(), *wide, *arguments, **options)
    assert_near(out, expected.bfloat16(), 1e-6)
    starts = int32([*range(len(LENGTHS) + 1)], device)
    arguments = (cache.tables, cache.slots, starts, cache.lengths, 0.2, 1)
    out = reference.prefill_attention(q, *given[:2], *arguments, **scales, **options)
    expected = reference.prefill_attention(q.float(), *wide, *arguments, **options)
    assert_near(out, expected.bfloat16(), 1e-6)


def test_an_fp8_cache_needs_scales_and_no_other_has_them(device):
    cache = make_cache([9], 2, 32, torch.float32, device)
    k, v, scales = quantized_pair(cache.k, cache.v)
    q = torch.randn(1, 4, 32, device=device)
    where = (cache.tables, cache.slots, cache.lengths, 0.2)
    with pytest.raises(ValueError, match=r"k_cache is in torch.float8_e4m3fn, and scales are not"):
        attention.decode_attention(q, k, v, *where)
    with pytest.raises(ValueError, match=r"k_cache is in torch.float32, and scales are given"):
        attention.decode_attention(q, cache.k, cache.v, *where, scales=scales)


def found_needles(attended: Tensor, values: Tensor) -> Tensor:
    """For each query head, the index of the most similar value in `[needles, head_dim]`."""
    normed = torch.nn.functional.normalize
    return (normed(attended, dim=-1) @ normed(values, dim=-1).T).argmax(-1)


@pytest.mark.parametrize("length", [4096, 32768])
def test_planted_keys_are_found_in_a_long_context(length, device):
    """Queries ask for keys at all depths of a context of random keys.

    With clear queries, FP8 caches find every key like plain ones. With queries so noisy that some
    keys are lost, FP8 loses at most one in 64 more than the plain cache.
    """
    torch.manual_seed(length)
    needles, head_dim, dtype = 64, 64, torch.float16
    cache = random_cache(length, head_dim, device)
    places = torch.linspace(0, length - 1, needles).long().to(device)
    block, at = cache.tables[0, places // BLOCK_SIZE].long(), places % BLOCK_SIZE
    needle_keys, needle_values = cache.k[block, 0, at], cache.v[block, 0, at]
    plain, (k, v, scales) = (cache.k.to(dtype), cache.v.to(dtype)), quantized_pair(cache.k, cache.v)
    wanted = torch.arange(needles, device=device)
    for sharpness in (1.0, 0.35):
        noise = torch.randn(needles, head_dim, device=device)
        # One row with a query head for each needle.
        q = (3.0 * (sharpness * needle_keys + (1 - sharpness) * noise)).to(dtype)[None]
        arguments = (cache.tables, cache.slots, cache.lengths, head_dim**-0.5)
        outputs = [
            reference.decode_attention(q, *plain, *arguments),
            reference.decode_attention(q, k, v, *arguments, scales=scales),
            attention.decode_attention(q, k, v, *arguments, scales=scales),
        ]
        by_plain, by_reference, by_kernel = (
            (found_needles(out[0].float(), needle_values) == wanted).sum().item() for out in outputs
        )
        if sharpness == 1.0:
            assert by_plain == by_reference == by_kernel == needles
        else:
            assert 0.2 * needles < by_plain < needles, "keys must be hard to find, but not too hard"
            assert min(by_reference, by_kernel) >= by_plain - 1


def random_cache(length: int, head_dim: int, device: torch.device) -> Cache:
    blocks = length // BLOCK_SIZE
    k, v = torch.randn(2, blocks + 1, 1, BLOCK_SIZE, head_dim, device=device)
    tables = (1 + torch.randperm(blocks)).int()[None].to(device)
    return Cache(k, v, tables, int32([0], device), int32([length], device))
