"""Attention of a row has the same bits in any batch and with any cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.test_attention import BLOCK_SIZE, Cache, make_cache
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.ops.reference import attention as reference
from pagewire.worker.ops.triton import attention as usual
from pagewire.worker.ops.triton.invariant import decode as decode_module
from pagewire.worker.ops.triton.invariant import ops
from pagewire.worker.ops.triton.invariant.decode import SegmentDecodeConfig
from pagewire.worker.ops.triton.invariant.prefill import SegmentPrefillConfig
from pagewire.worker.ops.triton.invariant.segments import SEGMENT, TILE
from pagewire.worker.protocol.steps.step import StepPrefixGroup
from pagewire.worker.runtime.prefix_groups import ItemSizes, item_views, pack_items
from support.kernels.any_threads import any_threads
from support.kernels.comparison import CUDA, DTYPES, FULL_SIZE, assert_near, poisoned_outputs

HEADS = [(4, 2, 16), (3, 1, 32)]
# The interpreter is slow: each data type with one shape there.
CASES = [(heads, dtype) for heads, dtype in zip(HEADS, DTYPES, strict=True)]
if FULL_SIZE:
    CASES = [(heads, dtype) for heads in [(32, 8, 128), (16, 8, 64)] for dtype in DTYPES]
# Around the ends of tiles and segments.
LENGTHS = [
    *(1, 17, TILE - 1, TILE, TILE + 1, SEGMENT - 1, SEGMENT, SEGMENT + 1),
    *(SEGMENT + TILE, 2 * SEGMENT - 1, 2 * SEGMENT + 1, 3 * SEGMENT + 30),
]
# Weights are rounded to multiples of 2^-17 before they are used.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with nullcontext() if CUDA else any_threads():
        yield


def queries(count: int, heads: tuple[int, int, int], dtype: torch.dtype, device) -> Tensor:
    return torch.randn(count, heads[0], heads[2], device=device).to(dtype)


def decode(q: Tensor, cache: Cache, rows: list[int], **options) -> Tensor:
    """Attend from some rows of `q`, in this order."""
    at = torch.tensor(rows, device=q.device)
    with poisoned_outputs():
        return ops.decode_attention(
            q[at], cache.k, cache.v, cache.tables, cache.slots[at], cache.lengths[at], 0.3,
            **options,
        )  # fmt: skip


def int32(values: object, device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_a_row_decodes_alone_as_among_others(heads, dtype, device):
    cache = make_cache(LENGTHS, heads[1], heads[2], dtype, device)
    q = queries(len(LENGTHS), heads, dtype, device)
    together = decode(q, cache, list(range(len(LENGTHS))))
    clean = (cache.clean_k.float(), cache.clean_v.float())
    expected = reference.decode_attention(
        q.float(), *clean, cache.tables, cache.slots, cache.lengths, 0.3
    )
    assert_near(together, expected.to(dtype), TOLERANCE[dtype])
    for row in range(len(LENGTHS)):
        assert torch.equal(decode(q, cache, [row])[0], together[row]), LENGTHS[row]
    backwards = decode(q, cache, [*range(len(LENGTHS) - 1, -1, -1)])
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("programs", [1, 2, 9])
def test_shares_change_no_bits(programs, device):
    heads, dtype = HEADS[0], DTYPES[0]
    lengths = [0, 3 * SEGMENT + 7, 20, 0, 2 * SEGMENT, 300]
    cache = make_cache(lengths, heads[1], heads[2], dtype, device)
    q = queries(len(lengths), heads, dtype, device)
    expected = torch.stack([decode(q, cache, [row])[0] for row in range(len(lengths))])
    config = SegmentDecodeConfig(programs, warps=4, stages=1)
    assert torch.equal(decode(q, cache, list(range(len(lengths))), config=config), expected)
    assert not expected[0].any()


@pytest.mark.parametrize("per_program", [1, 2])
def test_a_batch_that_is_too_long_for_the_scratch_memory(monkeypatch, per_program, device):
    heads, dtype = HEADS[0], DTYPES[0]
    lengths = [4 * SEGMENT + 1, 9, 2 * SEGMENT + 5, 70, 3 * SEGMENT]
    cache = make_cache(lengths, heads[1], heads[2], dtype, device)
    q = queries(len(lengths), heads, dtype, device)
    rows = list(range(len(lengths)))
    expected = decode(q, cache, rows)
    monkeypatch.setattr(decode_module, "UNITS_PER_PROGRAM", per_program)
    assert torch.equal(decode(q, cache, rows), expected)


def test_rows_of_a_larger_graph(device):
    """Padding rows have length 0; rows that a chunk owns have a negative one and stay."""
    heads, dtype = HEADS[0], torch.float16
    cache = make_cache([300, 40, 0, 5], heads[1], heads[2], dtype, device)
    q = queries(4, heads, dtype, device)
    alone = [decode(q, cache, [row])[0] for row in (0, 1)]
    lengths = cache.lengths.clone()
    lengths[3] = -1
    out = torch.full_like(q, 7)
    plan = ops.plan_decode(lengths, *heads, dtype)
    ops.decode_attention(
        q, cache.k, cache.v, cache.tables, cache.slots, lengths, 0.3, plan=plan,
        beside_prefill=True, out=out,
    )  # fmt: skip
    assert torch.equal(out[:2], torch.stack(alone))
    assert not out[2].any()
    assert (out[3] == 7).all()


def prefill(
    q: Tensor, cache: Cache, chunk: int, config: SegmentPrefillConfig | None = None
) -> Tensor:
    """Attend from all positions of the only sequence, some at a time."""
    pieces = []
    for begin in range(0, len(q), chunk):
        end = min(begin + chunk, len(q))
        starts, length = int32([0, end - begin], q.device), int32([end], q.device)
        with poisoned_outputs():
            pieces.append(
                ops.prefill_attention(
                    q[begin:end], cache.k, cache.v, cache.tables, cache.slots, starts, length, 0.3,
                    end - begin, config=config,
                )
            )  # fmt: skip
    return torch.cat(pieces)


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_a_prompt_decodes_to_the_same_bits_in_chunks_of_any_size(heads, dtype, device):
    length = SEGMENT + TILE + 9
    cache = make_cache([length], heads[1], heads[2], dtype, device)
    q = queries(length, heads, dtype, device)
    whole = prefill(q, cache, length)
    clean = (cache.clean_k.float(), cache.clean_v.float())
    starts = int32([0, length], device)
    expected = reference.prefill_attention(
        q.float(), *clean, cache.tables, cache.slots, starts, cache.lengths, 0.3, length
    )
    assert_near(whole, expected.to(dtype), TOLERANCE[dtype])
    for chunk in (50, TILE, 150):
        assert torch.equal(prefill(q, cache, chunk), whole), chunk
    config = SegmentPrefillConfig(rows=64, warps=4, stages=1)
    assert torch.equal(prefill(q, cache, length, config), whole)
    for position in (0, 1, TILE - 1, TILE, 200, SEGMENT - 1, SEGMENT, SEGMENT + 1, length - 1):
        decoded = ops.decode_attention(
            q[position : position + 1], cache.k, cache.v, cache.tables, cache.slots,
            int32([position + 1], device), 0.3,
        )  # fmt: skip
        assert torch.equal(decoded[0], whole[position]), position


def test_chunks_of_several_sequences_have_the_bits_of_each_alone(device):
    heads, dtype = HEADS[0], DTYPES[0]
    chunks = [(5, 5), (40, SEGMENT + 3), (1, TILE), (70, 70)]  # queries, tokens cached
    cache = make_cache([length for _, length in chunks], heads[1], heads[2], dtype, device)
    starts = np.cumsum([3, *(count for count, _ in chunks)]).tolist()
    q = queries(starts[-1] + 4, heads, dtype, device)
    out = torch.full_like(q, 7)
    ops.prefill_attention(
        q, cache.k, cache.v, cache.tables, cache.slots, int32(starts, device), cache.lengths, 0.3,
        70, out=out,
    )  # fmt: skip
    assert (out[:3] == 7).all()
    assert not out[starts[-1] :].any()
    for chunk, (count, _) in enumerate(chunks):
        begin = starts[chunk]
        alone = ops.prefill_attention(
            q[begin : begin + count], cache.k, cache.v, cache.tables,
            cache.slots[chunk : chunk + 1], int32([0, count], device),
            cache.lengths[chunk : chunk + 1], 0.3, count,
        )  # fmt: skip
        assert torch.equal(out[begin : begin + count], alone)


def shared_rows(
    groups: list[tuple[list[int], int]], lengths: list[int], heads, dtype, device
) -> tuple[Cache, SharedPrefixItems]:
    """Rows whose tables begin with the same blocks, and the items of their groups."""
    rows = len(lengths)
    cache = make_cache(lengths, heads[1], heads[2], dtype, device)
    tables, slots = cache.tables.clone(), cache.slots.cpu().numpy()
    for members, blocks in groups:
        of_members = torch.from_numpy(slots[members]).long()
        tables[of_members, :blocks] = tables[of_members[0], :blocks]
    limits = ops.shared_prefix_limits(dtype, heads[2], heads[0] // heads[1])
    sizes = ItemSizes(limits, kv_heads=heads[1], processors=5, block_size=BLOCK_SIZE)
    given = tuple(StepPrefixGroup(blocks, slots[members]) for members, blocks in groups)
    packed = torch.from_numpy(pack_items(given, slots, rows, sizes))
    cache = Cache(cache.k, cache.v, tables, cache.slots, cache.lengths)
    return cache, item_views(packed.to(device), rows, limits.max_ranges)


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("overfull", [False, True])
def test_a_shared_prefix_changes_no_bits(monkeypatch, overfull, heads, dtype, device):
    if overfull:  # each row then reads its prefix itself
        monkeypatch.setattr(decode_module, "UNITS_PER_PROGRAM", 1)
    # An inner group follows its outer one; blocks of 16 positions.
    groups = [([0, 1, 2, 3], 19), ([1, 2], 40), ([5, 6], 10)]
    lengths = [310, 700, 645, 600, 90, 200, 170]
    cache, shared = shared_rows(groups, lengths, heads, dtype, device)
    covered = shared.lengths.tolist()
    assert covered == [SEGMENT, 2 * SEGMENT, 2 * SEGMENT, SEGMENT, 0, 0, 0]
    q = queries(len(lengths), heads, dtype, device)
    rows = list(range(len(lengths)))
    alone = torch.stack([decode(q, cache, [row])[0] for row in rows])
    assert torch.equal(decode(q, cache, rows, shared=shared), alone)


def test_items_are_whole_segments_and_no_more_than_the_memory_holds():
    limits = ops.shared_prefix_limits(torch.bfloat16, 128, 4)
    sizes = ItemSizes(limits, kv_heads=8, processors=132, block_size=BLOCK_SIZE)
    groups = (StepPrefixGroup(16 * (limits.max_ranges + 9), np.arange(40, dtype=np.int32)),)
    packed = torch.from_numpy(pack_items(groups, np.arange(40, dtype=np.int32), 40, sizes))
    shared = item_views(packed, 40, limits.max_ranges)
    items = shared.items[: int(shared.num_items)]
    assert (items[:, 2] - items[:, 1] == SEGMENT).all()
    assert (items[:, 1] == items[:, 5] * SEGMENT).all()
    assert (shared.counts == limits.max_ranges).all()
    assert (shared.lengths == limits.max_ranges * SEGMENT).all()


@pytest.mark.skipif(CUDA, reason="it shows what the interpreter of this test can find")
def test_attention_that_cuts_anywhere_does_depend_on_the_batch(device):
    """A negative control: without the mode, bits differ for the same rows."""
    heads, dtype, lengths = HEADS[0], torch.float32, [70, 300, 17]
    cache = make_cache(lengths, heads[1], heads[2], dtype, device)
    q = queries(len(lengths), heads, dtype, device)
    arguments = (cache.k, cache.v, cache.tables)
    together = usual.decode_attention(q, *arguments, cache.slots, cache.lengths, 0.3)
    alone = [
        usual.decode_attention(
            q[row : row + 1], *arguments, cache.slots[row : row + 1],
            cache.lengths[row : row + 1], 0.3,
        )[0]
        for row in range(len(lengths))
    ]  # fmt: skip
    assert not torch.equal(torch.stack(alone), together)


@pytest.mark.parametrize("block_size", [48, 128])
def test_blocks_of_any_size_hold_the_same_segments(block_size, device):
    heads, dtype, length = HEADS[0], DTYPES[0], SEGMENT + 70
    small = make_cache([length], heads[1], heads[2], dtype, device)
    q = queries(1, heads, dtype, device)
    expected = decode(q, small, [0])
    position = torch.arange(length, device=device)
    count = -(-length // block_size)
    tables = int32([[*range(count, 0, -1)]], device)
    block, at = tables[0, position // block_size].long(), position % block_size
    of_small = small.tables[small.slots[0], position // BLOCK_SIZE].long()
    copies = []
    for cache in (small.k, small.v):
        copy = torch.zeros(count + 1, heads[1], block_size, heads[2], dtype=dtype, device=device)
        copy[block, :, at] = cache[of_small, :, position % BLOCK_SIZE]
        copies.append(copy)
    large = Cache(*copies, tables, int32([0], device), small.lengths)
    assert torch.equal(decode(q, large, [0]), expected)


@pytest.mark.parametrize(("window", "soft_cap"), [(24, None), (None, 30.0)])
def test_windows_and_soft_caps_are_refused(window: int | None, soft_cap: float | None) -> None:
    empty = torch.empty(0, dtype=torch.int32)
    q, cache = torch.empty(0, 4, 32), torch.empty(1, 2, 16, 32)
    where = (q, cache, cache, empty[None], empty)
    with pytest.raises(ValueError, match="no windows and no soft caps"):
        ops.decode_attention(*where, empty, 1.0, window=window, soft_cap=soft_cap)
    with pytest.raises(ValueError, match="no windows and no soft caps"):
        ops.prefill_attention(*where, empty, empty, 1.0, 1, window=window, soft_cap=soft_cap)
    sinks = torch.zeros(4)
    with pytest.raises(ValueError, match="no sinks"):
        ops.decode_attention(*where, empty, 1.0, sinks=sinks)
    with pytest.raises(ValueError, match="no sinks"):
        ops.prefill_attention(*where, empty, empty, 1.0, 1, sinks=sinks)
    if window is not None:
        with pytest.raises(ValueError, match="no windows and no soft caps"):
            ops.plan_decode(empty, 4, 2, 32, torch.bfloat16, window=window)
