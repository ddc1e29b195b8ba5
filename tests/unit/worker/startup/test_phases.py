"""The phases of a start begin with the process."""

import time

import pytest

from pagewire.worker.startup.phases import StartupPhases

CLOCK_TICK = 0.01  # of the age of a process, in seconds


def test_the_first_phase_begins_with_the_process() -> None:
    # Measured bounds, because a busy machine may stop this process anywhere.
    earliest = time.monotonic()
    before = StartupPhases()
    before.end("until now")
    began = time.monotonic()
    time.sleep(0.05)
    ended = time.monotonic()
    phases = StartupPhases()
    phases.end("imports")
    latest = time.monotonic()
    difference = phases.seconds - before.seconds
    assert ended - began - 2 * CLOCK_TICK < difference < latest - earliest + 2 * CLOCK_TICK
    time.sleep(0.05)
    phases.end("sleeping")
    (imports, first), (sleeping, second) = (part.rsplit(" ", 1) for part in str(phases).split(", "))
    assert (imports, sleeping) == ("imports", "sleeping")
    assert float(first) + float(second) == pytest.approx(phases.seconds, abs=0.11)
