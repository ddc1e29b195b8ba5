"""The kernel of QK norm, RoPE and KV write against its reference, and that against Llama."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pagewire.worker.ops.reference import rope as reference
from pagewire.worker.ops.triton import rope
from pagewire.worker.ops.triton.rope import RopeKernelConfig
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

BLOCK_SIZE = 16
SLOTS, MAX_BLOCKS = 3, 8
TOKENS = [1, 5, 37] + ([256, 257, 4096] if FULL_SIZE else [])
# (query heads, KV heads, head size)
HEADS = [(4, 2, 64), (9, 3, 32), (2, 1, 128)] + ([(32, 8, 128), (8, 1, 256)] if FULL_SIZE else [])


def make_arguments(
    tokens: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    norms: tuple[bool, bool] = (True, True),
) -> tuple:
    """Tokens of several sequences at distinct positions in random order."""
    query_heads, kv_heads, head_dim = heads
    torch.manual_seed(tokens + head_dim)
    max_blocks = max(MAX_BLOCKS, -(-tokens // BLOCK_SIZE))
    places = torch.randperm(SLOTS * max_blocks * BLOCK_SIZE)[:tokens].int()
    frequencies = 1e4 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.outer(torch.arange(max_blocks * BLOCK_SIZE), frequencies)
    weights = [
        (1 + torch.randn(head_dim)).to(device, dtype) if normed else None for normed in norms
    ]
    return (
        torch.randn(tokens, (query_heads + 2 * kv_heads) * head_dim).to(device, dtype),
        *weights,
        1e-6,
        torch.cat((angles.cos(), angles.sin()), 1).to(device),
        (places % (max_blocks * BLOCK_SIZE)).to(device),
        (places // (max_blocks * BLOCK_SIZE)).to(device),
        (1 + torch.randperm(SLOTS * max_blocks).view(SLOTS, max_blocks)).int().to(device),
    )


def empty_caches(arguments: tuple, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Caches full of NaN, so that wrong and missing writes are found."""
    tables = arguments[-1]
    shape = (1 + tables.numel(), heads[1], BLOCK_SIZE, heads[2])
    return [torch.full(shape, torch.nan, dtype=dtype, device=tables.device) for _ in range(2)]


def compare(arguments, heads, dtype, config=None, unscaled=None, waited_for=False) -> None:
    caches = empty_caches(arguments, heads, dtype)
    expected_caches = empty_caches(arguments, heads, dtype)
    with poisoned_outputs():
        q = rope.qk_norm_rope_kv_write(
            *arguments, *caches, unscaled=unscaled, waited_for=waited_for, config=config
        )
    expected = reference.qk_norm_rope_kv_write(*arguments, *expected_caches, unscaled=unscaled)
    assert_near(q, expected, TOLERANCE[dtype])
    assert_same_writes(caches, expected_caches, TOLERANCE[dtype])


def assert_same_writes(caches: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for cache, expected_cache in zip(caches, expected, strict=True):
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        assert_near(cache.nan_to_num(), expected_cache.nan_to_num(), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_the_reference(tokens, heads, dtype, device):
    compare(make_arguments(tokens, heads, dtype, device), heads, dtype)


@pytest.mark.parametrize("norms", [(False, False), (True, False), (False, True)])
def test_norms_are_optional(norms, device):
    heads = (4, 2, 32)
    arguments = make_arguments(7, heads, torch.float16, device, norms)
    compare(arguments, heads, torch.float16)


@pytest.mark.parametrize("config", [RopeKernelConfig(2, 8, 2), RopeKernelConfig(4, 2, 4)], ids=str)
def test_tiles(config, device):
    heads = (5, 3, 32)
    compare(make_arguments(11, heads, torch.float16, device), heads, torch.float16, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 100])
@pytest.mark.parametrize("config", [None, RopeKernelConfig(2, 8, 2)], ids=str)
def test_what_is_not_scaled_yet_is_scaled(hidden, config, dtype, device):
    heads = (5, 3, 32)
    for normed in (True, False):
        arguments = make_arguments(11, heads, dtype, device, (normed, normed))
        x = (3 * torch.randn(11, hidden, device=device)).to(dtype)
        compare(arguments, heads, dtype, config, unscaled=x, waited_for=normed)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_projection_and_what_follows_it(tokens, biased, device):
    """Both implementations equal norm, projection and rotation one after another."""
    heads, dtype = (4, 2, 32), torch.float32
    _, *norms, eps, cos_sin, positions, slots, tables = make_arguments(tokens, heads, dtype, device)
    x = 3 * torch.randn(tokens, 64, device=device)
    weight = torch.randn(256, 64, device=device)
    bias = torch.randn(256, device=device) if biased else None
    normed = x / (x.square().mean(1, keepdim=True) + eps).sqrt()
    qkv = torch.nn.functional.linear(normed, weight, bias)
    place = (cos_sin, positions, slots, tables)
    whole = (qkv, *norms, eps, *place)
    expected_caches = empty_caches(whole, heads, dtype)
    expected = reference.qk_norm_rope_kv_write(*whole, *expected_caches)
    for module in (reference, rope):
        caches = empty_caches(whole, heads, dtype)
        q = module.norm_qkv_rope_kv_write(x, eps, weight, bias, *norms, *place, *caches)
        assert_near(q, expected, 1e-5)
        assert_same_writes(caches, expected_caches, 1e-5)
        given = torch.full_like(q, torch.nan)
        again = module.norm_qkv_rope_kv_write(
            x, eps, weight, bias, *norms, *place, *caches, out=given
        )
        assert again is given
        assert torch.equal(given, q)


def test_the_reference_rotates_as_llama_does(device):
    heads = (4, 2, 64)
    arguments = make_arguments(9, heads, torch.float32, device, (False, False))
    caches = empty_caches(arguments, heads, torch.float32)
    q = reference.qk_norm_rope_kv_write(*arguments, *caches)

    qkv, *_, cos_sin, positions, slots, tables = arguments
    given_q, given_k, given_v = qkv.view(9, 8, 64).split([4, 2, 2], 1)
    cos, sin = (x.repeat(1, 2)[None] for x in cos_sin[positions.long()].chunk(2, 1))
    by_head = (x.transpose(0, 1)[None] for x in (given_q, given_k))  # [1, heads, tokens, 64]
    rotated_q, rotated_k = (x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*by_head, cos, sin))
    blocks = tables[slots.long(), positions.long() // BLOCK_SIZE].long()
    assert_near(q, rotated_q, 1e-6)
    assert_near(caches[0][blocks, :, positions.long() % BLOCK_SIZE], rotated_k, 1e-6)
    assert torch.equal(caches[1][blocks, :, positions.long() % BLOCK_SIZE], given_v)
