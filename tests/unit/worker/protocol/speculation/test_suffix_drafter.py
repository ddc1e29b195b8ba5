"""The search for the longest repeated suffix, against one that looks at every place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagewire.worker.protocol.speculation.suffix_drafter import (
    LONGEST_MATCH,
    SHORTEST_MATCH,
    SuffixDrafter,
)

TOKENS = st.lists(st.integers(0, 3), max_size=80)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def naive(tokens: list[int], most: int) -> list[int]:
    """The result that `draft` promises, place by place."""

    def matched(place: int) -> int:
        length = 0
        while length < min(place, LONGEST_MATCH) and (
            tokens[place - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        return length

    places = range(1, len(tokens))
    longest = max((matched(place) for place in places), default=0)
    if longest < SHORTEST_MATCH or most < 1:
        return []
    best = [place for place in places if matched(place) == longest]
    whole = [place for place in best if place + most <= len(tokens)]
    begin = whole[-1] if whole else best[0]
    return tokens[begin : begin + most]


@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=5), most=st.integers(0, 9))
def test_a_draft_follows_the_latest_of_the_longest_matches(
    prompt: list[int], pieces: list[list[int]], most: int
) -> None:
    drafter, tokens = SuffixDrafter(array(prompt)), list(prompt)
    assert drafter.draft(most).tolist() == naive(tokens, most)
    for piece in pieces:
        drafter.extend(array(piece))
        tokens += piece
        assert drafter.draft(most).tolist() == naive(tokens, most)


def test_what_came_before_comes_again() -> None:
    drafter = SuffixDrafter(array([1, 2, 3, 4, 5, 9, 1, 2]))
    assert drafter.draft(3).tolist() == []  # two tokens are not evidence
    drafter.extend(array([3]))
    assert drafter.draft(3).tolist() == [4, 5, 9]
    drafter.extend(array([7]))
    assert drafter.draft(4).tolist() == []


def test_a_long_text_grows() -> None:
    drafter = SuffixDrafter(array([]))
    for token in range(1000):
        drafter.extend(array([token]))
    drafter.extend(array([500, 501, 502]))
    assert drafter.draft(3).tolist() == [503, 504, 505]
