"""The pool and its prefix cache: allocated, found and evicted blocks."""

import numpy as np
import pytest

from pagewire.scheduler.core.kv.block_pool import BlockPool, OutOfBlocksError


def test_the_pool_never_hands_out_the_scratch_block() -> None:
    pool = BlockPool(4, 2)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(OutOfBlocksError, match="1 blocks wanted, 0 available"):
        pool.allocate(1)


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released but not held"):
        pool.release(blocks[:1])
    pool.check()


def data(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def test_a_prefix_is_found_by_its_tokens_only() -> None:
    pool = BlockPool(10, 2)
    blocks = pool.allocate(3)
    pool.cache(blocks, data(1, 2, 3, 4, 5, 6))
    assert pool.match(data(1, 2, 3, 4, 9, 9)) == blocks[:2]
    assert pool.match(data(3, 4, 5, 6)) == []
    assert pool.match(data(1, 2, 3)) == blocks[:1]
    pool.check()


def test_a_match_inside_a_run_ends_at_the_first_difference() -> None:
    """Blocks below a run belong to texts with the whole run, not only with its beginning."""
    pool = BlockPool(10, 2)
    run = pool.allocate(3)
    pool.cache(run, data(1, 1, 2, 2, 3, 3))
    tail = pool.allocate(1)
    pool.cache([*run, *tail], data(1, 1, 2, 2, 3, 3, 4, 4))
    assert pool.match(data(1, 1, 4, 4)) == run[:1]
    assert pool.match(data(1, 1, 2, 2, 4, 4)) == run[:2]


def test_idle_blocks_are_evicted_from_the_least_recently_used_leaf() -> None:
    pool = BlockPool(6, 2)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.cache(old, data(1, 1, 2, 2))
    pool.cache(new, data(3, 3, 4, 4))
    pool.release(old)
    pool.release(new)
    assert (pool.free, pool.idle, pool.available, pool.used) == (1, 4, 5, 0)
    pool.allocate(2)
    assert pool.match(data(1, 1, 2, 2)) == old[:1]
    assert pool.match(data(3, 3, 4, 4)) == new
    pool.check()


def test_held_blocks_are_not_evicted() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.cache(blocks, data(1, 1, 2, 2))
    pool.acquire(blocks)
    pool.release(blocks)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    pool.release(blocks)
    assert len(pool.allocate(3)) == 3
    assert pool.match(data(1, 1)) == []
    pool.check()


def test_a_duplicate_keeps_its_own_block() -> None:
    pool = BlockPool(9, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.cache(first, data(1, 1, 2, 2))
    pool.cache(second, data(1, 1, 2, 2, 3, 3))
    pool.release(first)
    pool.release(second)
    assert (pool.used, pool.idle) == (0, 2)
    assert pool.match(data(1, 1, 2, 2, 3, 3)) == first
    pool.check()
