"""Loop lag: a blocked event loop is distinguished from a machine without a free CPU."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pagewire.lifecycle.loop_lag import LoopLag, _cpu_wait, measure_loop_lag
from support.waiting import eventually


def longest(registry: CollectorRegistry, cause: str) -> float:
    value = registry.get_sample_value("pagewire_loop_lag_max_seconds", {"cause": cause})
    assert value is not None
    return value


def above(registry: CollectorRegistry, cause: str, bound: str) -> float:
    """How many calls were later than a bucket's bound."""
    name = "pagewire_loop_lag_seconds"
    total = registry.get_sample_value(f"{name}_count", {"cause": cause})
    below = registry.get_sample_value(f"{name}_bucket", {"cause": cause, "le": bound})
    assert total is not None
    assert below is not None
    return total - below


def calls(registry: CollectorRegistry) -> float:
    """How many calls have been measured."""
    value = registry.get_sample_value("pagewire_loop_lag_seconds_count", {"cause": "loop"})
    assert value is not None
    return value


async def test_a_blocked_loop_shows() -> None:
    registry = CollectorRegistry()
    measure_loop_lag(registry)
    await eventually(lambda: calls(registry) >= 4)
    assert above(registry, "loop", "0.2") == 0
    time.sleep(0.3)  # noqa: ASYNC251 - that is the fault
    await eventually(lambda: above(registry, "loop", "0.2") == 1)
    assert 0.25 < longest(registry, "loop") < 1


async def test_time_without_a_cpu_is_the_machines() -> None:
    registry, waited = CollectorRegistry(), 0.0
    LoopLag(asyncio.get_running_loop(), lambda: waited, registry).start()
    await eventually(lambda: calls(registry) >= 2)
    time.sleep(0.3)  # noqa: ASYNC251
    waited = 0.25
    await eventually(lambda: longest(registry, "machine") > 0)
    assert longest(registry, "machine") == pytest.approx(0.25)
    assert longest(registry, "loop") < 0.2


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the kernel has no /proc/thread-self/schedstat",
)
def test_a_thread_that_shares_its_cpu_waits_for_it() -> None:
    cpus = os.sched_getaffinity(0)
    one = {min(cpus)}
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(rival.pid, one)
        os.sched_setaffinity(0, one)
        wait = _cpu_wait()
        before, end = wait(), time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        assert 0.05 < wait() - before < 1.0
        before = wait()
        time.sleep(0.1)
        assert wait() - before < 0.1
    finally:
        os.sched_setaffinity(0, cpus)
        rival.kill()
        rival.wait()
