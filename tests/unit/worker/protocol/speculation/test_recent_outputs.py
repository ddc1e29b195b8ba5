"""Recent outputs: found again, bounded, and never those of another salt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.worker.protocol.speculation import recent_outputs
from pagewire.worker.protocol.speculation.recent_outputs import (
    CAPACITY,
    MATCH,
    MAX_SALTS,
    RecentBySalt,
    RecentOutputs,
    _slot,
    _slots,
)


def array(tokens: list[int] | range) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_what_followed_is_drafted_up_to_the_end_of_its_output() -> None:
    recent = RecentOutputs()
    recent.add(array(range(50, 70)))
    recent.add(array(range(80, 90)))
    assert recent.draft(array(range(52, 56)), 3).tolist() == [56, 57, 58]
    assert recent.draft(array(range(63, 67)), 7).tolist() == [67, 68, 69]
    assert recent.draft(array(range(66, 70)), 7).tolist() == []  # nothing followed
    assert recent.draft(array([53, 54, 55, 99]), 3).tolist() == []
    assert recent.draft(array([1, 2, 3, 4]), 3).tolist() == []


def test_the_latest_one_wins() -> None:
    recent = RecentOutputs()
    recent.add(array([1, 2, 3, 4, 5, 6]))
    recent.add(array([1, 2, 3, 4, 7, 8]))
    assert recent.draft(array([1, 2, 3, 4]), 2).tolist() == [7, 8]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=12), st.integers(1, 7))
def test_a_draft_is_what_followed_in_some_output(outputs: list[list[int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_outputs, "CAPACITY", 64)  # so that older ones are overwritten
        recent = RecentOutputs()
        for output in outputs:
            recent.add(array(output))
            for last in outputs:
                if len(last) < MATCH:
                    continue
                drafts = recent.draft(array(last[-MATCH:]), most).tolist()
                text = "".join(map(str, last[-MATCH:] + drafts))
                assert any(text in "".join(map(str, each)) for each in outputs)


def test_memory_is_bounded() -> None:
    recent = RecentOutputs()
    for begin in range(0, 3 * CAPACITY, 1000):
        recent.add(array(range(begin, begin + 1000)))
    assert recent._tokens.nbytes + recent._places.nbytes == 384 << 10
    newest = 3 * CAPACITY // 1000 * 1000 + 500
    assert recent.draft(array(range(newest, newest + 4)), 1).tolist() == [newest + 4]
    assert recent.draft(array(range(500, 504)), 1).tolist() == []
    recent.add(array(range(5 * CAPACITY)))  # more than fits
    last = 5 * CAPACITY - 10
    assert recent.draft(array(range(last, last + 4)), 1).tolist() == [last + 4]


def test_salts_share_nothing() -> None:
    salts = RecentBySalt()
    salts.of("a").add(array(range(50, 70)))
    assert salts.of("a").draft(array(range(52, 56)), 1).tolist() == [56]
    assert salts.of("").draft(array(range(52, 56)), 1).tolist() == []
    for number in range(MAX_SALTS - 1):
        salts.of(f"other {number}")
    assert salts.of("a").draft(array(range(52, 56)), 1).tolist() == []  # it was dropped
    assert len(salts._salts) == MAX_SALTS


@given(st.lists(st.integers(0, 2**31 - 1), min_size=MATCH, max_size=20))
def test_both_ways_of_hashing_agree(tokens: list[int]) -> None:
    each = [_slot(array(tokens[i : i + MATCH])) for i in range(len(tokens) - MATCH + 1)]
    assert _slots(array(tokens)).tolist() == each


def test_the_latest_tokens_are_whole_outputs_and_the_end_of_one() -> None:
    recent = RecentOutputs()
    assert recent.latest(9).tolist() == []
    recent.add(array(range(50, 56)))
    recent.add(array(range(60, 65)))
    assert recent.latest(9).tolist() == [53, 54, 55, -1, 60, 61, 62, 63, 64, -1][1:]
    assert recent.latest(100).tolist() == [*range(50, 56), -1, *range(60, 65), -1]


@settings(deadline=None)
@given(st.lists(st.integers(5, 40), min_size=1, max_size=40), st.integers(1, 90))
def test_the_latest_tokens_go_round(lengths: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_outputs, "CAPACITY", 64)
        recent, everything = RecentOutputs(), []
        for number, length in enumerate(lengths):
            output = [100 * number + i for i in range(length)]
            recent.add(array(output))
            everything += [*output, -1]
        got = recent.latest(most).tolist()
    assert 0 < len(got) <= most
    assert got == everything[-len(got) :]
    # The last output is available. The remaining room has older tokens, except at the end of a lap.
    assert len(got) >= min(most, lengths[-1] + 1)
