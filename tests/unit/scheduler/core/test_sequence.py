"""Sequences: failures and recovery."""

from pagewire.scheduler.core.sequence import RECOVERED_AFTER
from support.sequences import sequence


def test_failures_are_counted_from_zero_after_recovery() -> None:
    failing = sequence(1, 10)
    assert [failing.record_failure() for _ in range(2)] == [1, 2]
    failing.output.append(5)  # as after the prefill alone
    assert failing.record_failure() == 3
    failing.output.extend([5] * RECOVERED_AFTER)
    assert failing.record_failure() == 1


def test_a_whole_prompt_reads_nothing_from_a_cache() -> None:
    pooled = sequence(20, 1)
    assert (pooled.max_cached, pooled.max_length) == (19, 21)
    pooled.pools = True
    assert (pooled.max_cached, pooled.max_length) == (19, 20)
    pooled.whole_prompt = True
    assert pooled.max_cached == 0
