"""The phases of a start begin with the process."""

import time

import pytest

from pagewire.worker.startup.phases import StartupPhases


def test_the_first_phase_begins_with_the_process() -> None:
    before = StartupPhases()
    before.end("until now")
    time.sleep(0.05)
    phases = StartupPhases()
    phases.end("imports")
    assert 0.04 < phases.seconds - before.seconds < 1
    time.sleep(0.05)
    phases.end("sleeping")
    (imports, first), (sleeping, second) = (part.rsplit(" ", 1) for part in str(phases).split(", "))
    assert (imports, sleeping) == ("imports", "sleeping")
    assert float(first) + float(second) == pytest.approx(phases.seconds, abs=0.11)
