"""The rate of a queue, and the Retry-After that follows from it."""

from pagewire.drain_rate import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, DrainRate


def test_the_rate_follows_what_leaves() -> None:
    rate = DrainRate(0.0)
    assert rate.retry_after(10, 0.0) == MIN_RETRY_SECONDS, "nothing has had the time to leave"
    for tick in range(1, 1001):
        rate.count_departure(tick / 20)
    assert 4.5 < rate.retry_after(100, 50.0) < 5.5
    for tick in range(1, 101):
        rate.count_departure(50 + tick)
    assert 40 < rate.retry_after(50, 150.0) < 55
    assert rate.retry_after(100, 250.0) == MAX_RETRY_SECONDS


def test_a_young_process_knows_its_rate() -> None:
    rate = DrainRate(100.0)
    for tick in range(1, 41):
        rate.count_departure(100 + tick / 20)
    assert 9 < rate.retry_after(200, 102.0) < 11
    assert rate.retry_after(1, 102.0) == MIN_RETRY_SECONDS


def test_a_rate_that_is_not_known_is_taken_to_be_fast() -> None:
    rate = DrainRate(0.0)
    assert rate.seconds_for(1000, 0.001) < 1.5
    assert rate.seconds_for(10, 5.0) > 30, "nothing has left for 5 s"


def test_time_with_an_empty_queue_does_not_count() -> None:
    rate = DrainRate(0.0)
    for tick in range(1, 201):
        rate.count_departure(tick / 20)
    known = rate.seconds_for(100, 10.0)
    assert 4.5 < known < 5.5
    rate.skip_idle_time(4000.0)
    assert abs(rate.seconds_for(100, 4000.0) - known) < 1e-6
    for tick in range(1, 101):
        rate.count_departure(4000 + tick / 10)
    assert 5.5 < rate.seconds_for(100, 4010.0) < 9.5
