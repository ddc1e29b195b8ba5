"""Log probabilities of a prompt: in order, each once, and the usable part of the cache."""

import numpy as np
import pytest

from pagewire.scheduler.core.prompt_logprobs import PromptLogprobs, ScoredTokens
from pagewire.scheduler.core.sequence import State
from support.sequences import admit, answer, can_admit, counted, new_batch


def scored(begin: int, end: int, top: int = 1) -> ScoredTokens:
    places = np.arange(begin, end, dtype=np.int32)
    values = -places.astype(np.float32)
    ids = np.repeat(places[:, None], top, axis=1)
    return ScoredTokens(begin, values, places, ids, ids.astype(np.float32))


def test_parts_are_joined_with_as_many_likeliest_tokens_as_are_wanted() -> None:
    collected = PromptLogprobs(num_top=2, num_prompt=9)
    collected.add(scored(1, 4, top=2))
    assert not collected.complete
    collected.add(scored(4, 9, top=5))
    assert collected.complete
    joined = collected.joined()
    assert joined.ranks.tolist() == list(range(1, 9))
    assert joined.top_ids.tolist() == [[place, place] for place in range(1, 9)]
    assert joined.top_logprobs.shape == (8, 2)


def test_one_token_has_none() -> None:
    collected = PromptLogprobs(num_top=3, num_prompt=1)
    assert collected.complete
    assert collected.joined().top_ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (scored(1, 3), "tokens 1 to 2, where those from 3 on were due"),
        (scored(4, 6), "where those from 3 on were due"),
        (scored(3, 10), "of 9 tokens"),
        (scored(3, 5, top=0), "0 likeliest tokens instead of 1"),
    ],
)
def test_repeated_missing_and_incomplete_parts_are_refused(
    part: ScoredTokens, message: str
) -> None:
    collected = PromptLogprobs(num_top=1, num_prompt=9)
    collected.add(scored(1, 3))
    with pytest.raises(ValueError, match=message):
        collected.add(part)
    assert collected.next == 3


def test_only_tokens_without_missing_log_probabilities_come_from_the_cache() -> None:
    batch = new_batch(num_blocks=32, num_slots=4, budget=10)
    other = counted(26, 3, arrival=0)
    admit(batch, other)
    for _ in range(2):
        answer(batch, batch.plan())
    sequence = counted(26, 3, arrival=1)
    sequence.prompt_logprobs = PromptLogprobs(num_top=0, num_prompt=26)
    assert can_admit(batch, sequence), "it does not wait for a prefix that it cannot use"
    assert not can_admit(batch, counted(26, 3, arrival=2))
    answer(batch, batch.plan())
    assert batch.find_cached(sequence).num_tokens == 0
    assert sequence.max_cached == 0

    admit(batch, sequence)
    answer(batch, batch.plan())  # one decode row and 9 tokens
    sequence.prompt_logprobs.add(scored(1, 10, top=0))
    batch.finish(sequence.slot, State.PENDING)
    assert sequence.max_cached == 9
    cached = batch.find_cached(sequence)
    assert (cached.num_tokens, cached.num_full) == (8, 2)
    admit(batch, sequence)
    assert sequence.num_computed == 8

    sequence.prompt_logprobs.add(scored(10, 26, top=0))
    assert sequence.max_cached == 25
    batch.check()
