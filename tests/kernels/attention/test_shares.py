"""The plan of decode attention: shares cover the line, and segments stay whole if possible."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pagewire.worker.ops.triton.attention.shares import plan_shares

TILE = 16

# Lengths, KV heads, programs, and whether no segment is cut.
CASES = [
    ([64] * 7, 2, 3, True),  # 5, 5 and 4 segments of 4 tiles
    ([64, 0, 64, 64, 0, 64, 64, 64, 64], 2, 3, True),
    ([160] * 8 + [161] * 8, 8, 33, True),  # 4 segments, or 3; one tile more for half of them
    ([64] * 6, 1, 6, True),
    ([1000] * 3, 8, 25, True),  # 24 of 25 programs have a segment
    ([64] * 15, 2, 8, True),  # 4 or 3: 1/15 more than an equal share
    ([64] * 7, 2, 4, False),  # 4 or 3: 1/7 more
    ([1000] * 3, 8, 40, False),
    ([64] * 7 + [640], 2, 3, False),
    ([1, 15, 16, 17, 33, 100, 500], 2, 5, False),
    ([0, 0], 2, 4, True),
]


@pytest.mark.parametrize(("share", "long"), [(40, True), (41, False)])
def test_long_shares_have_longer_tiles(share, long, device):
    given = torch.tensor([70, 0, 50], dtype=torch.int32, device=device)
    plan = plan_shares(given, None, 2, TILE, 6, 1, long_tile=64, long_share=share)
    tile = 64 if long else TILE
    assert plan.shares[2].item() == tile
    assert plan.ends.tolist() == [2 * -(-70 // tile)] * 2 + [2 * (-(-70 // tile) + -(-50 // tile))]


@pytest.mark.parametrize(("lengths", "kv_heads", "programs", "whole"), CASES, ids=str)
@pytest.mark.parametrize("min_share", [1, 2])
def test_shares(lengths, kv_heads, programs, whole, min_share, device):
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = plan_shares(given, None, kv_heads, TILE, programs, min_share)
    units, begins, rows = plan.units.tolist(), plan.begins.tolist(), plan.rows.tolist()
    tiles = [-(-length // TILE) for length in lengths]
    held = [row for row, count in enumerate(tiles) if count]
    total = sum(tiles) * kv_heads
    sizes = [end - begin for begin, end in pairwise(units)]

    assert (units[0], units[-1]) == (0, total)
    assert min(sizes) >= 0
    assert rows[: len(held)] == held
    assert plan.ends.tolist() == torch.tensor(tiles).mul(kv_heads).cumsum(0).tolist()
    for unit, size, (number, within) in zip(units, sizes, begins, strict=False):
        if size:
            before = sum(tiles[row] for row in held[:number]) * kv_heads
            assert before + within == unit
            assert within < tiles[held[number]] * kv_heads

    edges = {0}
    for row in held:
        edges |= {max(edges) + head * tiles[row] for head in range(1, kv_heads + 1)}
    share, longer = plan.shares.tolist()
    if whole:
        assert set(units) <= edges
        assert (share, longer) == (total, 0)  # the whole line: the merge finds no cut segment
    else:
        assert not set(units) <= edges
        assert [size for size in sizes if size] == [share + 1] * longer + [share] * (
            (total - longer * (share + 1)) // share
        )


@pytest.mark.parametrize("rows", [128, 256, 512])
def test_rows_of_one_length_stay_whole_on_132_multiprocessors(rows, device):
    """The batches in which whole segments were measured: they fill 1,056 programs well."""
    lengths = torch.full((rows,), 768, dtype=torch.int32, device=device)
    lengths[: rows // 2] += 1  # another tile
    plan = plan_shares(lengths, None, 8, 32, 1056, 2)
    assert plan.shares.tolist() == [plan.units[-1].item(), 0]
