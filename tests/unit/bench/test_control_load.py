"""The CPU time of a process."""

import os
import time

import pytest

from pagewire.bench.control_load import cpu_seconds


def test_cpu_counts_all_time_of_a_process() -> None:
    before, own = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    assert cpu_seconds(os.getpid()) - before == pytest.approx(0.2, abs=0.1)
