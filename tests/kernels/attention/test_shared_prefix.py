"""Decode attention over shared prefixes against the reference, which reads each row separately."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.shared_prefix import PrefixLimits
from pagewire.worker.ops.reference import attention as reference
from pagewire.worker.ops.triton import attention
from pagewire.worker.protocol.steps.step import StepPrefixGroup
from pagewire.worker.runtime.prefix_groups import (
    MAX_ITEMS,
    ItemSizes,
    buffer_length,
    item_views,
    pack_items,
)
from support.kernels.comparison import (
    CUDA,
    DTYPES,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)

BLOCK_SIZE = 16
HEADS = [(4, 2, 64), (2, 2, 32)]
# By group: members, leading blocks; an inner group follows its outer one.
SMALL = [([0, 1, 2, 3, 4], 9), ([1, 2, 3], 13), ([5, 6], 4), ([8, 9], 3)]
SMALL_LENGTHS = [150, 209, 300, 210, 145, 65, 100, 20, 80, 70, 0]
# 9 and 13 blocks have 128 and 192 positions in whole units; 3 blocks have none.
GROUPS = {
    "nested": (SMALL, SMALL_LENGTHS, {0, 64, 128, 192}),
    "alike": ([(list(range(20)), 9)], [170] * 20, {128}),
}
if FULL_SIZE:
    HEADS += [(16, 8, 128), (32, 8, 128), (8, 2, 256)]
    LARGE = [(list(range(g, 90, 3)), 128) for g in range(3)]
    INNER = [(list(range(0, 90, 6)), 140), (list(range(0, 90, 12)), 160)]
    GROUPS["three of 2048"] = (LARGE + INNER, [2570 + 5 * row for row in range(90)], {2048})


def int32(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("case", GROUPS)
def test_shared_prefixes_change_nothing(case, heads, dtype, device):
    compare(case, heads, dtype, device)


@pytest.mark.parametrize(
    "options", [{"soft_cap": 0.7}, {"window": 70, "soft_cap": 0.7}, {"sinks": 3.0}], ids=str
)
def test_shared_prefixes_change_nothing_with_options(options, device):
    compare("nested", (2, 2, 32), torch.float16, device, **options)


def compare(
    case: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    **options: float,
) -> None:
    groups, lengths, shared_lengths = GROUPS[case]
    query_heads, kv_heads, head_dim = heads
    rows = len(lengths)
    torch.manual_seed(rows)
    columns = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.zeros(rows + 1, columns, dtype=torch.int32)
    tables[:rows] = 1 + torch.randperm(rows * columns).view(rows, columns)
    for members, blocks in groups:
        tables[members, :blocks] = tables[members[0], :blocks]
    cache = torch.randn(2, rows * columns + 1, kv_heads, BLOCK_SIZE, head_dim).to(device, dtype)
    slots = np.arange(rows, dtype=np.int32)
    sharing = ItemSizes(
        limits=attention.shared_prefix_limits(dtype, head_dim, query_heads // kv_heads),
        kv_heads=kv_heads,
        processors=132 if CUDA else 1,
        block_size=BLOCK_SIZE,
    )
    packed = pack_items(groups_of(*groups), slots, rows, sharing)
    assert len(packed) == buffer_length(rows)
    shared = item_views(torch.from_numpy(packed).to(device), rows)
    assert set(shared.lengths.tolist()) >= shared_lengths
    if case == "alike" and not CUDA:  # few programs run in the interpreter: segments stay whole
        plan = attention.plan_decode(int32(lengths, device), *heads, dtype, shared=shared)
        assert plan.shares.tolist() == [plan.units[-1], 0]
    q = torch.randn(rows, query_heads, head_dim, device=device).to(dtype)
    arguments = (tables.to(device), int32(slots, device), int32(lengths, device), head_dim**-0.5)
    if "sinks" in options:
        most = options["sinks"]
        options["sinks"] = torch.linspace(-most, most, query_heads, device=device)
    with poisoned_outputs():
        out = attention.decode_attention(q, *cache, *arguments, shared=shared, **options)
    expected = reference.decode_attention(q.float(), *cache.float(), *arguments, **options)
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


def ranges_of(
    groups: tuple[StepPrefixGroup, ...], decode: list[int], members: int = 2
) -> dict[int, list]:
    """The `(slot, begin, end)` ranges of each row, in the order of their ordinals."""
    sharing = ItemSizes(PrefixLimits(members), kv_heads=1, processors=1, block_size=BLOCK_SIZE)
    rows = len(decode)
    packed = pack_items(groups, np.array(decode, np.int32), rows, sharing)
    shared = item_views(torch.from_numpy(packed), rows)
    found: dict[int, dict] = {}
    assert int(shared.num_items) <= MAX_ITEMS
    for slot, begin, end, first, count, ordinal in shared.items[: shared.num_items].tolist():
        assert 1 <= count <= members
        for row in shared.entries[first : first + count].tolist():
            assert ordinal not in found.setdefault(row, {})
            found[row][ordinal] = (slot, begin, end)
    ordered = {row: [by[i] for i in sorted(by)] for row, by in found.items()}
    for row, ranges in ordered.items():
        assert len(ranges) == shared.counts[row]
        assert sorted(found[row]) == list(range(len(ranges)))
        edges = [edge for _, begin, end in ranges for edge in (begin, end)]
        assert edges[0] == 0
        assert edges[-1] == shared.lengths[row]
        assert edges[1:-1:2] == edges[2::2], "ranges follow one another"
    return ordered


def groups_of(*groups: tuple[list[int], int]) -> tuple[StepPrefixGroup, ...]:
    return tuple(StepPrefixGroup(blocks, np.array(members, np.int32)) for members, blocks in groups)


def test_rows_follow_the_decode_list():
    found = ranges_of(groups_of(([3, 5, 9], 64)), [9, 1, 3, 5], members=8)
    assert set(found) == {0, 2, 3}
    assert {slot for ranges in found.values() for slot, _, _ in ranges} <= {3, 5, 9}


def test_all_rows_of_a_slot_are_members():
    found = ranges_of(groups_of(([3, 5], 64)), [3, 3, 3, 1, 5, 5], members=8)
    assert set(found) == {0, 1, 2, 4, 5}


@pytest.mark.parametrize("kernels", ["triton", "invariant"])
def test_rows_of_drafts_share_a_prefix(kernels, device):
    """Rows without a draft or of an ended sequence are empty, and may be listed, too."""
    ops, heads, dtype = load_ops(kernels), (4, 2, 64), torch.float16
    query_heads, kv_heads, head_dim = heads
    of, lengths = [0, 0, 0, 1, 2, 2], [600, 601, 0, 530, 0, 0]
    torch.manual_seed(1)
    columns = -(-601 // BLOCK_SIZE)
    tables = torch.zeros(4, columns, dtype=torch.int32)
    tables[:3] = 1 + torch.randperm(3 * columns).view(3, columns)
    tables[:3, :32] = tables[0, :32]
    cache = torch.randn(2, 3 * columns + 1, kv_heads, BLOCK_SIZE, head_dim).to(device, dtype)
    sharing = ItemSizes(
        limits=ops.shared_prefix_limits(dtype, head_dim, query_heads // kv_heads),
        kv_heads=kv_heads,
        processors=132 if CUDA else 1,
        block_size=BLOCK_SIZE,
    )
    packed = pack_items(groups_of(([0, 1, 2], 32)), np.array(of, np.int32), 6, sharing)
    shared = item_views(torch.from_numpy(packed).to(device), 6, sharing.limits.max_ranges)
    assert shared.lengths.tolist() == [512] * 6
    slots = [slot if length else 3 for slot, length in zip(of, lengths, strict=True)]
    q = torch.randn(6, query_heads, head_dim, device=device).to(dtype)
    arguments = (tables.to(device), int32(slots, device), int32(lengths, device), head_dim**-0.5)
    plan = ops.plan_decode(int32(lengths, device), *heads, dtype, shared=shared)
    with poisoned_outputs():
        out = ops.decode_attention(q, *cache, *arguments, shared=shared, plan=plan)
    expected = reference.decode_attention(q.float(), *cache.float(), *arguments)
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])
    assert not out[[2, 4, 5]].any()


def test_many_nested_groups_leave_no_row_with_too_many_ranges():
    nested = [(list(range(20 - depth)), 64 * (depth + 1)) for depth in range(12)]
    found = ranges_of(groups_of(*nested), list(range(20)))
    assert all(ranges for ranges in found.values())


def test_more_groups_than_there_is_room_for():
    pairs = [([2 * i, 2 * i + 1], 1024) for i in range(MAX_ITEMS // 2)]
    ranges_of(groups_of(*pairs), list(range(MAX_ITEMS)))
