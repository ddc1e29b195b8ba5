"""Parts of a snapshot: bounded, true to the state, and without a token of any text."""

import numpy as np

from pagewire.scheduler.core.kv.block_pool import BlockPool, BlockState
from pagewire.scheduler.core.kv.host_tier import HostMemory
from pagewire.scheduler.snapshots.maps import block_map, prefix_outline

FREE, CACHED, HELD, SHARED = BlockState


def data(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def cached_text(pool: BlockPool, *tokens: int) -> list[int]:
    """Caches a text whose first blocks may be cached already; its blocks, which are held."""
    found = pool.match(data(*tokens))
    pool.acquire(found)
    blocks = found + pool.allocate(len(tokens) // pool.block_size - len(found))
    pool.note_hits(found)
    pool.cache(blocks, data(*tokens))
    return blocks


def test_each_block_has_its_state() -> None:
    pool = BlockPool(9, 2)
    one = cached_text(pool, 1, 2, 3, 4)
    two = cached_text(pool, 1, 2, 5, 6)
    gone = cached_text(pool, 7, 8)
    pool.release(gone)
    states = pool.states()
    expected = {one[0]: SHARED, one[1]: HELD, two[1]: HELD, gone[0]: CACHED}
    assert {block: states[block - 1] for block in expected} == expected
    assert (states == FREE).sum() == 4
    message = block_map(states, 1024)
    assert message.cells == states.tobytes()
    assert list(message.counts) == [4, 1, 2, 1]


def test_a_large_pool_has_cells_of_several_blocks() -> None:
    states = np.zeros(2500, dtype=np.uint8)
    states[:4] = HELD
    states[2499] = CACHED
    message = block_map(states, 1024)
    assert message.blocks_per_cell == 3
    assert len(message.cells) == 834
    assert message.cells[0] == HELD
    assert message.cells[1] == FREE  # one of three is held
    assert message.cells[833] == CACHED  # the last cell has one block
    assert list(message.counts) == [2495, 1, 4, 0]


def test_a_pool_without_blocks_in_host_memory_has_no_cells() -> None:
    assert block_map(BlockPool(4, 2).host_states(), 16).cells == b""
    assert len(BlockPool(4, 2, HostMemory(num_blocks=5)).host_states()) == 5


def test_the_outline_has_sizes_and_hits_in_the_order_of_parents() -> None:
    pool = BlockPool(32, 2)
    cached_text(pool, 1, 2, 3, 4)
    cached_text(pool, 1, 2, 5, 6)
    cached_text(pool, 1, 2, 5, 6, 7, 8)
    outline = prefix_outline(pool.outline(16), pool.num_nodes)
    assert outline.num_nodes == 3
    assert sorted(outline.parents) == [0, 1, 1]
    assert outline.parents[0] == 0
    assert outline.blocks[0] == 1
    assert outline.hits[0] == 2
    assert outline.holders[0] == 3
    assert sorted(zip(outline.blocks, outline.hits, strict=True))[-1] == (2, 1)


def test_the_outline_is_bounded_and_shows_the_most_used() -> None:
    pool = BlockPool(4000, 2)
    for number in range(1000):
        cached_text(pool, 100 + number, 1)
    assert len(pool.outline(64)) == 16
    for _ in range(3):
        cached_text(pool, 1099, 1)
    first = pool.outline(8)[0]
    assert (first.hits, first.holders) == (3, 4)
    assert len(pool.outline(8)) == 8


def test_hits_go_when_a_block_is_reused_for_another_text() -> None:
    pool = BlockPool(3, 2)
    blocks = cached_text(pool, 1, 2, 3, 4)
    again = cached_text(pool, 1, 2, 3, 4)
    assert again == blocks
    pool.release(blocks)
    pool.release(again)
    cached_text(pool, 5, 6, 7, 8)
    [node] = pool.outline(8)
    assert node.hits == 0
