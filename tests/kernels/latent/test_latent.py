"""The kernels of latent attention against their references, and these against whole heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from pagewire.worker.ops.reference import attention as whole_heads
from pagewire.worker.ops.reference import latent as reference
from pagewire.worker.ops.triton import latent
from pagewire.worker.ops.triton.latent.decode import LatentDecodeConfig
from pagewire.worker.ops.triton.latent.heads import heads_of_tile
from pagewire.worker.ops.triton.latent.prefill import LatentPrefillConfig
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

BLOCK_SIZE = 16
LENGTHS = [1, 15, 16, 17, 33, 100]
CHUNKS = [(1, 1), (15, 15), (16, 33), (1, 100), (33, 40), (17, 17)]  # (queries, tokens cached)
SIZES = [(4, 32, 16), (5, 64, 16), (20, 16, 32)]  # (heads, rank, rotated values)
if FULL_SIZE:
    LENGTHS += [257, 3001, 4095]
    CHUNKS += [(300, 300), (100, 4095), (1025, 2050)]
    SIZES += [(16, 512, 64), (24, 256, 64), (128, 512, 64)]


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one layer for some sequences, with blocks in random order.

    `values` holds NaN at positions without a token; `clean` holds zeros there.
    """

    values: Tensor
    tables: Tensor
    slots: Tensor
    lengths: Tensor

    @property
    def clean(self) -> Tensor:
        return torch.nan_to_num(self.values)


def make_cache(
    lengths: list[int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> Cache:
    torch.manual_seed(sum(lengths) + width)
    counts = [-(-length // block_size) for length in lengths]
    slots = torch.randperm(len(lengths))
    tables = torch.zeros(len(lengths) + 1, max(counts) + 3, dtype=torch.int32)
    blocks = 1 + torch.randperm(sum(counts))
    values = torch.full((sum(counts) + 1, 1, block_size, width), torch.nan)
    for slot, length, run in zip(slots, lengths, blocks.split(counts), strict=True):
        tables[slot, : len(run)] = run
        tokens = torch.full((len(run) * block_size, width), torch.nan)
        tokens[:length] = torch.randn(length, width)
        values[run] = tokens.view(-1, 1, block_size, width)
    return Cache(
        values=values.to(device, dtype),
        tables=tables.to(device),
        slots=slots.int().to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def draw_queries(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Absorbed queries, and rotated ones as the last values of longer queries."""
    heads, rank, rotated_dim = sizes
    absorbed = torch.randn(tokens, heads, rank, device=device).to(dtype)
    queries = torch.randn(tokens, heads, 24 + rotated_dim, device=device).to(dtype)
    return absorbed, queries[..., 24:]


def compare_decode(
    lengths: list[int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: LatentDecodeConfig | None = None,
    block_size: int = BLOCK_SIZE,
) -> None:
    _, rank, rotated_dim = sizes
    cache = make_cache(lengths, rank + rotated_dim, dtype, device, block_size)
    queries = draw_queries(len(lengths), sizes, dtype, device)
    where = (cache.tables, cache.slots, cache.lengths, (rank + rotated_dim) ** -0.5)
    with poisoned_outputs():
        out = latent.latent_decode_attention(*queries, cache.values, *where, config=config)
    wide = (*(q.float() for q in queries), cache.clean.float())
    expected = reference.latent_decode_attention(*wide, *where)
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


def compare_prefill(
    chunks: list[tuple[int, int]],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    padding: int = 0,
    config: LatentPrefillConfig | None = None,
    before: int = 0,
) -> None:
    """Compare a call in which `before` tokens before the first chunk keep their output."""
    _, rank, rotated_dim = sizes
    counts = [count for count, _ in chunks]
    starts = list(accumulate(counts, initial=before))
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    cache = make_cache([length for _, length in chunks], rank + rotated_dim, dtype, device)
    queries = draw_queries(before + sum(counts) + padding, sizes, dtype, device)
    where = (cache.tables, cache.slots, starts, cache.lengths, 0.2, max(counts))
    out = torch.full_like(queries[0], torch.nan)
    out[:before] = 7
    latent.latent_prefill_attention(*queries, cache.values, *where, out=out, config=config)
    wide = (*(q.float() for q in queries), cache.clean.float())
    expected = reference.latent_prefill_attention(*wide, *where)
    expected[:before] = 7
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode(sizes, dtype, device):
    compare_decode(LENGTHS, sizes, dtype, device)


def test_decode_from_larger_blocks(device):
    compare_decode(LENGTHS, SIZES[0], torch.float16, device, block_size=48)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [70, 16, 3]], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("heads", [2, 16])
def test_decode_cut_into_many_shares(lengths, programs, heads, device):
    config = LatentDecodeConfig(heads, tile=16, warps=4, stages=2, programs=programs, share=16)
    compare_decode(lengths, (6, 32, 16), torch.float16, device, config)


@pytest.mark.parametrize("lengths", [[0], [0, 20, 0], [30, 0, 0, 5, 0], [0, 0]], ids=str)
def test_decode_of_empty_rows_gives_zeros(lengths, device):
    for config in (None, LatentDecodeConfig(2, tile=16, warps=4, stages=2, programs=3, share=16)):
        compare_decode(lengths, (4, 32, 16), torch.float16, device, config)


@pytest.mark.parametrize("rows", [2, 65, 300] if FULL_SIZE else [2, 65])
def test_decode_of_many_rows(rows, device):
    lengths = [1 + 7 * row % (2000 if FULL_SIZE else 18) for row in range(rows)]
    compare_decode(lengths, (2, 16, 16), torch.float16, device)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [0, 70, 0, 0, 16, 3, 0]], ids=str)
def test_decode_with_a_plan_for_all_layers(lengths, device):
    sizes, dtype = (4, 32, 16), torch.float16
    of_two = [make_cache(lengths, 48, dtype, device) for _ in range(2)]
    plan = latent.plan_latent_decode(of_two[0].lengths, 4, 32, dtype)
    assert (plan is None) == (len(lengths) == 1)
    for cache in of_two:
        queries = draw_queries(len(lengths), sizes, dtype, device)
        where = (cache.tables, cache.slots, cache.lengths, 0.2)
        with poisoned_outputs():
            out = latent.latent_decode_attention(*queries, cache.values, *where, plan=plan)
        wide = (*(q.float() for q in queries), cache.clean.float())
        expected = reference.latent_decode_attention(*wide, *where)
        assert_near(out, expected.to(dtype), TOLERANCE[dtype])


def test_decode_leaves_rows_of_negative_length_unchanged(device):
    """In a mixed step, chunks own the rows after the decode rows."""
    cache = make_cache([20, 7, 33], 48, torch.float32, device)
    queries = draw_queries(3, (4, 32, 16), torch.float32, device)
    lengths = cache.lengths.clone()
    lengths[1] = -1
    arguments = (*queries, cache.clean, cache.tables, cache.slots, lengths, 0.2)
    outs = [torch.full_like(queries[0], 7.0) for _ in range(2)]
    latent.latent_decode_attention(*arguments, out=outs[0])
    reference.latent_decode_attention(*arguments, out=outs[1])
    assert (outs[0][1] == 7).all()
    assert_near(*outs, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill(sizes, dtype, device):
    compare_prefill(CHUNKS, sizes, dtype, device, padding=3, before=2)


@pytest.mark.parametrize("heads", [3, 6])
def test_prefill_with_tiles_of_some_heads(heads, device):
    config = LatentPrefillConfig(rows=16, tile=16, warps=4, stages=1)
    compare_prefill(CHUNKS, (heads * 8, 16, 16), torch.float16, device, config=config)


@pytest.mark.parametrize("chunks", [[(1, 0)], [(5, 0), (3, 20), (4, 0)]], ids=str)
def test_prefill_of_padding_gives_zeros(chunks, device):
    compare_prefill(chunks, (4, 32, 16), torch.float16, device, padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("sizes", [(3, 24, 32, 16), (9, 128, 48, 32)], ids=str)
@pytest.mark.parametrize("place", ["new", "given", "same"])
def test_write(place, sizes, tokens, dtype, device):
    heads, plain_dim, rank, rotated_dim = sizes
    torch.manual_seed(tokens + rank)
    max_blocks, slots = 4, 3
    places = torch.randperm(slots * max_blocks * BLOCK_SIZE)[:tokens].int().to(device)
    angles = torch.randn(max_blocks * BLOCK_SIZE, rotated_dim // 2, device=device)
    width = heads * (plain_dim + rotated_dim)
    projected = (3 * torch.randn(tokens, width + rank + rotated_dim)).to(device, dtype)
    queries = projected[:, :width].unflatten(1, (heads, -1))
    if place == "same":
        queries = queries.contiguous()
    where = (
        projected[:, width:],
        (1 + torch.randn(rank)).to(device, dtype),
        1e-6,
        torch.cat((angles.cos(), angles.sin()), 1),
        places % (max_blocks * BLOCK_SIZE),
        places // (max_blocks * BLOCK_SIZE),
        (1 + torch.randperm(slots * max_blocks).view(slots, max_blocks)).int().to(device),
    )
    results = []
    for ops in (reference, latent):
        q = queries.clone() if place == "same" else queries
        out = {"new": None, "given": torch.full_like(queries.contiguous(), torch.nan), "same": q}
        cache = torch.full((1 + slots * max_blocks, 1, BLOCK_SIZE, rank + rotated_dim), torch.nan)
        cache = cache.to(device, dtype)
        results.append((ops.latent_rope_kv_write(q, *where, cache, out=out[place]), cache))
    (expected, expected_cache), (found, cache) = results
    assert found.is_contiguous()
    assert_near(found, expected, TOLERANCE[dtype])
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    assert_near(cache.nan_to_num(), expected_cache.nan_to_num(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_heads(dtype, device):
    x = torch.randn(7, 3, 40, device=device).to(dtype)[..., :24]
    weight = torch.randn(3, 52, 24, device=device).to(dtype)[:, :20].transpose(1, 2)
    expected = torch.einsum("thi,hio->tho", x.float(), weight.float()).to(dtype)
    for ops in (reference, latent):
        found = ops.multiply_heads(x, weight)
        assert found.is_contiguous()
        assert_near(found, expected, TOLERANCE[dtype])


def test_the_absorbed_form_is_attention_over_whole_heads(device):
    """The references together equal attention with keys and values of each head."""
    heads, plain, rank, rotated_dim, value = 3, 24, 32, 16, 24
    lengths = [5, 21]
    cache = make_cache(lengths, rank + rotated_dim, torch.float32, device)
    up_k = torch.randn(heads, plain, rank, device=device)
    up_v = torch.randn(heads, value, rank, device=device)
    vectors, rotated_keys = cache.clean.split([rank, rotated_dim], dim=3)
    keys = torch.cat(
        (
            torch.einsum("bosr,hpr->bhsp", vectors, up_k),
            rotated_keys.expand(-1, heads, -1, -1),
        ),
        dim=3,
    )
    values = torch.einsum("bosr,hvr->bhsv", vectors, up_v)
    values = torch.nn.functional.pad(values, (0, plain + rotated_dim - value))
    q = torch.randn(2, heads, plain + rotated_dim, device=device)
    where = (cache.tables, cache.slots, cache.lengths, 0.2)
    expected = whole_heads.decode_attention(q, keys, values, *where)[..., :value]
    absorbed = reference.multiply_heads(q[..., :plain], up_k)
    attended = reference.latent_decode_attention(absorbed, q[..., plain:], cache.clean, *where)
    assert_near(reference.multiply_heads(attended, up_v.transpose(1, 2)), expected, 1e-5)

    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    chunk = (cache.tables, cache.slots, starts, cache.lengths, 0.2, 1)
    again = reference.latent_prefill_attention(absorbed, q[..., plain:], cache.clean, *chunk)
    assert_near(again, attended, 1e-5)


@pytest.mark.parametrize(
    ("heads", "most", "tile"), [(16, 64, 16), (128, 64, 64), (96, 64, 48), (40, 16, 10), (7, 4, 1)]
)
def test_tiles_of_heads_divide_them(heads, most, tile):
    assert heads_of_tile(heads, most) == tile


def test_layouts_that_the_kernels_do_not_read_are_refused(device):
    cache = make_cache([5], 48, torch.float32, device)
    absorbed, rotated = draw_queries(1, (4, 32, 16), torch.float32, device)
    where = (cache.tables, cache.slots, cache.lengths, 0.2)

    def attend(absorbed: Tensor, rotated: Tensor, cache: Tensor) -> None:
        latent.latent_decode_attention(absorbed, rotated, cache, *where)

    with pytest.raises(ValueError, match="absorbed has strides"):
        attend(absorbed.repeat(1, 1, 2)[..., :32], rotated, cache.clean)
    with pytest.raises(ValueError, match="rotated has strides"):
        attend(absorbed, rotated.repeat_interleave(2, 2)[..., ::2], cache.clean)
    with pytest.raises(ValueError, match="48 values a token, not 32 \\+ 8"):
        attend(absorbed, rotated[..., :8], cache.clean)
    with pytest.raises(ValueError, match="rank is 40, not a power of two"):
        attend(torch.randn(1, 4, 40, device=device), rotated[..., :8], cache.clean)
    with pytest.raises(ValueError, match="block_size is 8, not a multiple of 16"):
        attend(absorbed, rotated, cache.clean[:, :, :8].contiguous())
