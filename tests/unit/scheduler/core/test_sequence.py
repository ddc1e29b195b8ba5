"""Sequences: failures and recovery."""

from pagewire.scheduler.core.sequence import RECOVERED_AFTER
from support.sequences import sequence


def test_failures_are_counted_from_zero_after_recovery() -> None:
    failing = sequence(1, 10)
    assert [failing.record_failure() for _ in range(2)] == [1, 2]
    failing.output.append(5)  # as the prefill alone gives one
    assert failing.record_failure() == 3
    failing.output.extend([5] * RECOVERED_AFTER)
    assert failing.record_failure() == 1
