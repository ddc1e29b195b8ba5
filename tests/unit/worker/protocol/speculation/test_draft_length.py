"""The number of drafts of a sequence."""

import pytest

from pagewire.worker.protocol.speculation.draft_length import LONGEST_PAUSE, DraftLength


def run(length: DraftLength, right: bool, steps: int, rows: int = 1) -> list[int]:
    lengths = []
    for _ in range(steps):
        lengths.append(length.next(rows))
        if lengths[-1]:
            length.observe(lengths[-1], lengths[-1] if right else 0)
    return lengths


def test_right_drafts_become_as_many_as_possible() -> None:
    assert run(DraftLength(7), right=True, steps=6)[-1] == 7


def test_wrong_drafts_become_rare() -> None:
    length = DraftLength(7)
    lengths = run(length, right=False, steps=600)
    assert sum(lengths[50:]) < 600 / 50
    assert any(lengths[-LONGEST_PAUSE - 1 :]), "it goes on trying"


def test_drafts_come_back_when_they_are_right_again() -> None:
    length = DraftLength(7)
    run(length, right=False, steps=200)
    assert run(length, right=True, steps=LONGEST_PAUSE + 30)[-1] == 7


@pytest.mark.parametrize("most", [1, 3, 15])
def test_there_are_never_more_than_allowed(most: int) -> None:
    assert max(run(DraftLength(most), right=True, steps=20)) == most


def test_among_many_rows_a_draft_must_be_more_likely() -> None:
    def half_right(rows: int) -> int:
        length = DraftLength(7)
        for _ in range(20):
            length.observe(2, 1)
        return length.next(rows)

    assert half_right(1) > half_right(4) > half_right(64) == 0


def test_drafts_that_take_time_to_make_have_to_be_right_more_often() -> None:
    free, costly = DraftLength(7), DraftLength(7, cost=0.3)
    for length in (free, costly):
        for _ in range(30):
            length.next(1)
            length.observe(4, 3)  # three of four
    assert free.rate == costly.rate == pytest.approx(0.75, abs=1e-3)
    assert 0 < costly.next(1) < free.next(1)
    assert DraftLength(7, cost=1.0).next(1) == 0
