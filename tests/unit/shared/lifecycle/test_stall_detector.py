"""When an activity counts as stalled."""

from pagewire.lifecycle.stall_detector import StallDetector


def test_it_has_stalled_after_so_many_polls_without_progress() -> None:
    detector = StallDetector(3)
    assert [detector.poll(7) for _ in range(5)] == [False, False, False, True, True]


def test_progress_starts_the_count_again() -> None:
    detector = StallDetector(2)
    polls = [detector.poll(progress) for progress in (1, 1, 2, 2, 2, 3)]
    assert polls == [False] * 4 + [True, False]


def test_without_anything_to_do_nothing_stalls() -> None:
    detector = StallDetector(2)
    polls = [detector.poll(1, busy) for busy in (True, True, False, True, True)]
    assert polls == [False, False, False, False, True]
