"""How long whoever is refused should wait."""

from pagewire.drain_rate import LONGEST, SHORTEST, DrainRate


def test_the_rate_follows_what_leaves() -> None:
    rate = DrainRate(0.0)
    assert rate.seconds_for(10, 0.0) == LONGEST, "nothing has ever left"
    for tick in range(1, 1001):
        rate.left(tick / 20)
    assert 4.5 < rate.seconds_for(100, 50.0) < 5.5
    for tick in range(1, 101):
        rate.left(50 + tick)
    assert 90 / 2 < rate.seconds_for(50, 150.0) < 55
    assert rate.seconds_for(100, 250.0) == LONGEST


def test_a_young_process_knows_its_rate() -> None:
    rate = DrainRate(100.0)
    for tick in range(1, 41):
        rate.left(100 + tick / 20)
    assert 9 < rate.seconds_for(200, 102.0) < 11
    assert rate.seconds_for(1, 102.0) == SHORTEST
