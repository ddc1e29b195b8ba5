"""Numbers of rows that decode graphs are captured for."""

from dataclasses import replace

import pytest

from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import MAX_DRAFTED_ROWS, decode_buckets, row_buckets

LIMITS = Limits(
    vocab_size=100,
    num_slots=20,
    block_size=16,
    num_blocks=10,
    max_model_len=64,
    max_num_batched_tokens=2048,
)


def test_without_drafts_there_is_a_row_for_each_sequence() -> None:
    assert decode_buckets(LIMITS) == row_buckets(LIMITS) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    ("slots", "drafts", "tokens", "most"),
    [
        (4, 3, 2048, 16),
        (20, 15, 2048, 320),
        (64, 15, 2048, MAX_DRAFTED_ROWS),
        (64, 15, 100, 100),
        (700, 15, 2048, 700),
    ],
)
def test_with_drafts_there_are_more(slots: int, drafts: int, tokens: int, most: int) -> None:
    limits = replace(LIMITS, num_slots=slots, max_num_batched_tokens=tokens)
    drafting = replace(limits, max_drafts=drafts, drafts_on_device=True)
    buckets = decode_buckets(drafting)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    # Heads of mixed steps are captured for these, and sampling for the same numbers as decode.
    assert set(row_buckets(drafting)) <= set(buckets)
