"""The attention kernels against their references, and the references against the formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from pagewire.worker.ops.reference import attention as reference
from pagewire.worker.ops.triton import attention
from pagewire.worker.ops.triton.attention.decode import DecodeConfig, LongShares, decode_config
from pagewire.worker.ops.triton.attention.merge import MergeConfig
from pagewire.worker.ops.triton.attention.prefill import PrefillConfig
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

BLOCK_SIZE = 16
LENGTHS = [1, 15, 16, 17, 33, 100]
CHUNKS = [(1, 1), (15, 15), (16, 33), (1, 100), (33, 40), (17, 17)]  # (queries, tokens cached)
# (query heads, KV heads, head size)
OPTIONS = [
    {"window": 1},
    {"window": 16},
    {"window": 23},
    {"window": 4096},
    {"soft_cap": 0.7},
    {"window": 40, "soft_cap": 0.7},
    {"sinks": 4.0},
    {"sinks": 40.0, "window": 23},
]
HEADS = [(2, 2, 32), (4, 2, 64), (5, 1, 32), (8, 1, 128), (20, 1, 16)]
if FULL_SIZE:
    LENGTHS += [257, 3001, 4095]
    CHUNKS += [(300, 300), (100, 4095), (1025, 2050)]
    HEADS += [(8, 8, 128), (16, 8, 128), (24, 8, 128), (28, 4, 128), (32, 4, 128), (8, 2, 256)]


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one layer for some sequences, with blocks in random order.

    `k` and `v` hold NaN at positions without a token; `clean_k` and `clean_v` hold zeros there.
    """

    k: Tensor
    v: Tensor
    tables: Tensor
    slots: Tensor
    lengths: Tensor

    @property
    def clean_k(self) -> Tensor:
        return torch.nan_to_num(self.k)

    @property
    def clean_v(self) -> Tensor:
        return torch.nan_to_num(self.v)


def make_cache(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> Cache:
    torch.manual_seed(sum(lengths) + head_dim)
    counts = [-(-length // block_size) for length in lengths]
    slots = torch.randperm(len(lengths))
    tables = torch.zeros(len(lengths) + 1, max(counts) + 3, dtype=torch.int32)
    blocks = 1 + torch.randperm(sum(counts))
    k, v = torch.full((2, sum(counts) + 1, kv_heads, block_size, head_dim), torch.nan)
    for slot, length, run in zip(slots, lengths, blocks.split(counts), strict=True):
        tables[slot, : len(run)] = run
        for cache in (k, v):
            tokens = torch.full((len(run) * block_size, kv_heads, head_dim), torch.nan)
            tokens[:length] = torch.randn(length, kv_heads, head_dim)
            cache[run] = tokens.view(-1, block_size, kv_heads, head_dim).transpose(1, 2)
    return Cache(
        k=k.to(device, dtype),
        v=v.to(device, dtype),
        tables=tables.to(device),
        slots=slots.int().to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def with_sinks(options: dict[str, float], query_heads: int, device: torch.device) -> dict:
    """Options of an operation: heads have sinks from `-options["sinks"]` to `options["sinks"]`."""
    if "sinks" not in options:
        return options
    most = options["sinks"]
    return {**options, "sinks": torch.linspace(-most, most, query_heads, device=device)}


def compare_decode(
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: DecodeConfig | None = None,
    block_size: int = BLOCK_SIZE,
    **options: float,
) -> None:
    query_heads, kv_heads, head_dim = heads
    cache = make_cache(lengths, kv_heads, head_dim, dtype, device, block_size)
    q = torch.randn(len(lengths), query_heads, head_dim, device=device).to(dtype)
    arguments = (cache.tables, cache.slots, cache.lengths, head_dim**-0.5)
    options = with_sinks(options, query_heads, device)
    with poisoned_outputs():
        out = attention.decode_attention(q, cache.k, cache.v, *arguments, config=config, **options)
    expected = reference.decode_attention(
        q.float(), cache.clean_k.float(), cache.clean_v.float(), *arguments, **options
    )
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


def compare_prefill(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    padding: int = 0,
    config: PrefillConfig | None = None,
    before: int = 0,
    **options: float,
) -> None:
    """Compare a call in which `before` tokens before the first chunk keep their output."""
    query_heads, kv_heads, head_dim = heads
    counts = [count for count, _ in chunks]
    starts = list(accumulate(counts, initial=before))
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    cache = make_cache([length for _, length in chunks], kv_heads, head_dim, dtype, device)
    q = torch.randn(before + sum(counts) + padding, query_heads, head_dim, device=device).to(dtype)
    arguments = (cache.tables, cache.slots, starts, cache.lengths, head_dim**-0.5, max(counts))
    options = with_sinks(options, query_heads, device)
    out = torch.full_like(q, torch.nan)
    out[:before] = 7
    attention.prefill_attention(q, cache.k, cache.v, *arguments, out=out, config=config, **options)
    expected = reference.prefill_attention(
        q.float(), cache.clean_k.float(), cache.clean_v.float(), *arguments, **options
    )
    expected[:before] = 7
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode(heads, dtype, device):
    compare_decode(LENGTHS, heads, dtype, device)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_decode_from_larger_blocks(block_size, device):
    compare_decode(LENGTHS, (4, 2, 32), torch.float16, device, block_size=block_size)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [70, 16, 3]], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
def test_decode_cut_into_many_shares(lengths, programs, device):
    config = DecodeConfig(tile=16, warps=4, stages=2, programs=programs, share=16)
    compare_decode(lengths, (6, 2, 32), torch.float16, device, config)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [0, 70, 0, 130, 3, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7, "sinks": 2.0}], ids=str)
def test_decode_in_long_shares(lengths, tile, options, device):
    config = DecodeConfig(tile=16, warps=1, stages=2, programs=3, share=16)
    config = replace(config, long=LongShares(tile, stages=3, share=0))
    compare_decode(lengths, (6, 2, 32), torch.float16, device, config, **options)


@pytest.mark.parametrize("lengths", [[96], [50, 0, 30]], ids=str)
def test_short_shares_keep_their_loop(lengths, device):
    cache = make_cache(lengths, 2, 32, torch.float16, device)
    q = torch.randn(len(lengths), 4, 32, device=device).half()
    arguments = (q, cache.k, cache.v, cache.tables, cache.slots, cache.lengths, 0.2)
    usual = DecodeConfig(tile=16, warps=1, stages=2, programs=1, share=16)
    config = replace(usual, long=LongShares(32, stages=3, share=10_000))
    expected = attention.decode_attention(*arguments, config=usual)
    assert torch.equal(attention.decode_attention(*arguments, config=config), expected)


@pytest.mark.skipif(not FULL_SIZE, reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("lengths", [[120_000], [60_000, 60_000], [100, 90_001]], ids=str)
@pytest.mark.parametrize("loop", [None, (16, 3), (16, 4)], ids=str)
def test_decode_of_long_sequences(lengths, loop, device):
    config = decode_config(torch.bfloat16, 128, 4, len(lengths))
    if loop is not None:
        config = replace(config, long=LongShares(*loop, share=64))
    compare_decode(lengths, (32, 8, 128), torch.bfloat16, device, config)


@pytest.mark.parametrize("lengths", [[100], [1, 100, 1], [0, 70, 0, 0, 16, 3, 0], [0, 0]], ids=str)
def test_decode_with_a_plan_for_all_layers(lengths, device):
    query_heads, kv_heads, head_dim = 4, 2, 32
    of_two = [make_cache(lengths, kv_heads, head_dim, torch.float16, device) for _ in range(2)]
    plan = attention.plan_decode(of_two[0].lengths, query_heads, kv_heads, head_dim, torch.float16)
    assert (plan is None) == (len(lengths) == 1)
    for cache in of_two:
        q = torch.randn(len(lengths), query_heads, head_dim, device=device).half()
        arguments = (cache.tables, cache.slots, cache.lengths, 0.2)
        with poisoned_outputs():
            out = attention.decode_attention(q, cache.k, cache.v, *arguments, plan=plan)
        expected = reference.decode_attention(
            q.float(), cache.clean_k.float(), cache.clean_v.float(), *arguments
        )
        assert_near(out, expected.half(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("lengths", [[100], [30, 0, 90]], ids=str)
def test_parts_of_a_head_are_merged_alike(lengths, device):
    cache = make_cache(lengths, 2, 32, torch.float16, device)
    q = torch.randn(len(lengths), 4, 32, device=device).half()
    arguments = (q, cache.k, cache.v, cache.tables, cache.slots, cache.lengths, 0.2)
    config = DecodeConfig(tile=16, warps=1, stages=2, programs=3, share=16)
    whole, halves = (
        attention.decode_attention(
            *arguments, config=replace(config, merge=MergeConfig(4, 1, parts))
        )
        for parts in (1, 2)
    )
    assert_near(halves, whole, TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("programs", "kv_heads", "taking_part"), [(528, 8, 512), (264, 8, 264), (528, 1, 512)]
)
def test_pieces_of_a_single_row_are_merged_in_whole_steps(programs, kv_heads, taking_part):
    assert MergeConfig(step=64, heads=1).programs(programs, kv_heads) == taking_part


@pytest.mark.parametrize("heads", [(2, 1, 16), (4, 4, 16)], ids=str)
@pytest.mark.parametrize("rows", [2, 65, 300, 500] if FULL_SIZE else [2, 65])
def test_decode_of_many_rows(rows, heads, device):
    longest = 2000 if FULL_SIZE else 18
    lengths = [1 + 7 * row % longest for row in range(rows)]
    compare_decode(lengths, heads, torch.float16, device)


@pytest.mark.parametrize("lengths", [[0], [0, 20, 0], [30, 0, 0, 5, 0], [0, 0]], ids=str)
def test_decode_of_empty_rows_gives_zeros(lengths, device):
    for config in (None, DecodeConfig(tile=16, warps=4, stages=2, programs=3, share=16)):
        compare_decode(lengths, (4, 2, 32), torch.float16, device, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 32), (5, 1, 64)], ids=str)
def test_decode_with_options(heads, options, dtype, device):
    compare_decode([*LENGTHS, 0, 64, 65], heads, dtype, device, **options)
    compare_decode([100], heads, dtype, device, **options)
    if dtype == torch.float16:
        config = DecodeConfig(tile=16, warps=4, stages=2, programs=3, share=16)
        compare_decode(LENGTHS, heads, dtype, device, config, **options)
        compare_decode(LENGTHS, heads, dtype, device, block_size=48, **options)


def test_a_plan_is_of_one_window(device):
    cache = make_cache([100, 90, 0], 2, 32, torch.float16, device)
    plan = attention.plan_decode(cache.lengths, 4, 2, 32, torch.float16, window=20)
    q = torch.randn(3, 4, 32, device=device).half()
    arguments = (cache.tables, cache.slots, cache.lengths, 0.2)
    with poisoned_outputs():
        out = attention.decode_attention(q, cache.k, cache.v, *arguments, plan=plan, window=20)
    expected = reference.decode_attention(
        q.float(), cache.clean_k.float(), cache.clean_v.float(), *arguments, window=20
    )
    assert_near(out, expected.half(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 32), (5, 1, 64)], ids=str)
def test_prefill_with_options(heads, options, dtype, device):
    chunks = [*CHUNKS, (70, 70), (20, 90), (0, 0)]
    compare_prefill(chunks, heads, dtype, device, padding=3, before=2, **options)
    if dtype == torch.float16:
        for config in (PrefillConfig(128, 64, 8, 3), PrefillConfig(16, 16, 4, 2)):
            compare_prefill(chunks, heads, dtype, device, config=config, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill(heads, dtype, device):
    compare_prefill(CHUNKS, heads, dtype, device)


@pytest.mark.parametrize(
    "config",
    [PrefillConfig(128, 64, 8, 3), PrefillConfig(16, 16, 4, 2), PrefillConfig(32, 64, 4, 1)],
    ids=str,
)
def test_prefill_tiles(config, device):
    compare_prefill(CHUNKS, (3, 1, 32), torch.float16, device, config=config)


def test_prefill_leaves_zeros_behind_the_last_chunk(device):
    for padding in (1, 40):
        compare_prefill([(5, 9), (3, 3)], (2, 1, 32), torch.float16, device, padding)


@pytest.mark.parametrize("before", [1, 7, 40])
def test_prefill_leaves_the_tokens_before_the_first_chunk(before, device):
    compare_prefill([(5, 9), (3, 3)], (2, 1, 32), torch.float16, device, 3, before=before)
    config = PrefillConfig(32, 16, 4, 1)
    compare_prefill([(40, 41)], (2, 1, 32), torch.float16, device, config=config, before=before)


def test_prefill_of_padding_chunks_gives_zeros(device):
    padding = [(6, 0), (0, 0), (0, 0)]
    compare_prefill([(5, 9), (3, 3), *padding], (2, 1, 32), torch.float16, device, before=2)


def test_prefill_of_many_chunks(device):
    chunks = [(1 + chunk % 3, 1 + chunk % 3 + chunk % 20) for chunk in range(20)]
    compare_prefill(chunks, (2, 1, 16), torch.float16, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_beside_prefill(heads, dtype, device):
    """The queries of decode rows come first, then those of chunks, as in a step."""
    query_heads, kv_heads, head_dim = heads
    rows, counts = len(LENGTHS), [count for count, _ in CHUNKS]
    starts = list(accumulate(counts, initial=rows))
    of_all = make_cache([*LENGTHS, *(n for _, n in CHUNKS)], kv_heads, head_dim, dtype, device)
    scale = head_dim**-0.5
    of_rows = (of_all.tables, of_all.slots[:rows], of_all.lengths[:rows], scale)
    of_chunks = (
        of_all.tables,
        of_all.slots[rows:],
        torch.tensor(starts, dtype=torch.int32, device=device),
        of_all.lengths[rows:],
        scale,
        max(counts),
    )
    q = torch.randn(starts[-1], query_heads, head_dim, device=device).to(dtype)
    out = torch.full_like(q, torch.nan)
    cache = (of_all.k, of_all.v)
    attention.prefill_attention(q, *cache, *of_chunks, out=out)
    attention.decode_attention(q[:rows], *cache, *of_rows, beside_prefill=True, out=out[:rows])
    expected = torch.full_like(q, torch.nan, dtype=torch.float32)
    cache = (of_all.clean_k.float(), of_all.clean_v.float())
    reference.prefill_attention(q.float(), *cache, *of_chunks, out=expected)
    reference.decode_attention(q[:rows].float(), *cache, *of_rows, out=expected[:rows])
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("bad", ["strides", "head_dim", "heads", "block_size"])
def test_unsupported_layouts_are_refused(bad, device):
    cache = make_cache([3], 2, 48 if bad == "head_dim" else 32, torch.float32, device)
    q = torch.randn(1, 3 if bad == "heads" else 4, cache.k.shape[3], device=device)
    if bad == "strides":
        q = q.transpose(0, 1).contiguous().transpose(0, 1).expand(2, -1, -1)
    k, v = cache.k, cache.v
    if bad == "block_size":
        k, v = k[:, :, :8].contiguous(), v[:, :, :8].contiguous()
    with pytest.raises(ValueError, match=r"contiguous|power of two|multiple"):
        attention.decode_attention(q, k, v, cache.tables, cache.slots, cache.lengths, 0.2)


def softmax_formula(
    q: Tensor,
    cache: Cache,
    row: int,
    length: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from `q [query_heads, head_dim]` to the first positions of a sequence."""
    position = torch.arange(length, device=q.device)[0 if window is None else -window :]
    blocks = cache.tables[cache.slots[row], position // BLOCK_SIZE].long()
    k, v = (x[blocks, :, position % BLOCK_SIZE] for x in (cache.k, cache.v))
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", q, k) * scale
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        total = scores.exp().sum(-1, keepdim=True) + sinks[:, None].exp()
        return torch.einsum("hl,lhd->hd", scores.exp() / total, v)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_the_decode_reference_follows_the_formula(options, device):
    cache = make_cache(LENGTHS, 2, 32, torch.float32, device)
    q = torch.randn(len(LENGTHS), 6, 32, device=device)
    options = with_sinks(options, 6, device)
    out = reference.decode_attention(
        q, cache.clean_k, cache.clean_v, cache.tables, cache.slots, cache.lengths, 0.2, **options
    )
    expected = [softmax_formula(q[r], cache, r, n, 0.2, **options) for r, n in enumerate(LENGTHS)]
    assert_near(out, torch.stack(expected), 2e-6)


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_the_prefill_reference_follows_the_formula(options, device):
    counts = [count for count, _ in CHUNKS]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    cache = make_cache([length for _, length in CHUNKS], 2, 32, torch.float32, device)
    q = torch.randn(sum(counts), 4, 32, device=device)
    options = with_sinks(options, 4, device)
    out = reference.prefill_attention(
        q, cache.clean_k, cache.clean_v, cache.tables, cache.slots, starts, cache.lengths, 0.2,
        max(counts), **options,
    )  # fmt: skip
    expected = [
        softmax_formula(
            q[starts[row] + query], cache, row, length - count + query + 1, 0.2, **options
        )
        for row, (count, length) in enumerate(CHUNKS)
        for query in range(count)
    ]
    assert_near(out, torch.stack(expected), 2e-6)


def test_the_prefill_reference_refuses_a_chunk_longer_than_max_query_length(device):
    cache = make_cache([8], 1, 32, torch.float32, device)
    q = torch.randn(8, 1, 32, device=device)
    starts = torch.tensor([0, 8], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="chunk 0 has 8 queries"):
        reference.prefill_attention(
            q, cache.k, cache.v, cache.tables, cache.slots, starts, cache.lengths, 0.2, 7
        )
