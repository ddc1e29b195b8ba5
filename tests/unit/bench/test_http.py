"""A load plan is divided among processes."""

import pytest

from pagewire.bench.http import split
from pagewire.bench.http_load import LoadPlan


@pytest.mark.parametrize("processes", [1, 3, 4, 50])
def test_shares_add_up_to_the_plan(processes: int) -> None:
    closed = LoadPlan("u", "m", 8, requests=10, concurrency=7)
    shares = split(closed, processes)
    assert len(shares) == min(processes, 7)
    assert sum(share.requests for share in shares) == 10
    assert sum(share.concurrency or 0 for share in shares) == 7
    assert all(share.requests and share.concurrency for share in shares)
    assert len({share.seed for share in shares}) == len(shares)

    opened = LoadPlan("u", "m", 8, requests=10, concurrency=None, request_rate=6.0)
    assert sum(share.request_rate or 0 for share in split(opened, processes)) == pytest.approx(6)
