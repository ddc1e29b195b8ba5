"""When something counts as standing still."""

from pagewire.lifecycle.stall import Stall


def test_so_many_looks_without_a_move_are_a_stall() -> None:
    stall = Stall(3)
    assert [stall.look(7) for _ in range(5)] == [False, False, False, True, True]


def test_a_move_starts_the_count_again() -> None:
    stall = Stall(2)
    assert [stall.look(moves) for moves in (1, 1, 2, 2, 2, 3)] == [False] * 4 + [True, False]


def test_who_has_nothing_to_do_may_stand_still() -> None:
    stall = Stall(2)
    looks = [stall.look(1, waiting) for waiting in (True, True, False, True, True)]
    assert looks == [False, False, False, False, True]
