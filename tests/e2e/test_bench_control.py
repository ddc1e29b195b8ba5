"""`pagewire bench control` with real processes, and the figures that it derives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.bench.control import summarize
from pagewire.bench.control_load import Window, cpu_seconds
from pagewire.bench.results import read_rows
from support.rows import values

COMMAND = [sys.executable, "-m", "pagewire.cli.main", "bench", "control"]


def test_it_measures_a_scheduler_on_simulated_workers(tmp_path: Path) -> None:
    output = tmp_path / "control.jsonl"
    done = subprocess.run(
        [*COMMAND, "--only=few,alone", "--seconds=3", f"--output={output}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PAGEWIRE_SCHEDULER_TOKEN": "a token of some length"},
    )
    assert done.returncode == 0, done.stderr
    commands = {row.command for row in read_rows(output)}
    assert commands == {"pagewire bench control --only few,alone --seconds 3"}
    result = values(output)
    assert result["few/tokens"] > 3000
    # 64 rows at about 100 tokens take the profile's time: 4.97 ms over 0.04.
    assert result["alone/tpot_ms_median"] == pytest.approx(124, rel=0.15)
    rate = result["alone/tokens"] / result["alone/seconds"]
    assert rate == pytest.approx(64e3 / 124, rel=0.3)
    assert 0 < result["alone/cpu_seconds/scheduler"] < result["alone/seconds"]
    assert all(row.commit for row in read_rows(output))


def test_an_unknown_scenario_is_refused() -> None:
    done = subprocess.run([*COMMAND, "--only=fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'fast' is no scenario; give some of throughput, busy" in done.stderr


def window(tokens: int, cpu: float, tpot: float = 1.0, slowest: float = 1.0) -> Window:
    return Window(10.0, tokens, 100, {"scheduler": cpu}, tpot, slowest, 1.0)


def test_the_figures_are_those_of_the_targets() -> None:
    found = summarize(
        {
            "throughput": window(800_000, 5),
            "busy": window(256_000, 1),
            "step": window(256_000, 2),
            "few": window(100_000, 1),
            "many": window(100_000, 1.1),
            "alone": window(1, 1, 100, 105),
            "together": window(1, 1, 101, 110),
        }
    )
    assert list(found.values()) == pytest.approx(
        [80_000, 1.0, 2.0, 10.0, 11.0, 10.0, 100.0, 101.0, 110.0, 10.0]
    )


def test_cpu_counts_all_time_of_a_process() -> None:
    before, own = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    assert cpu_seconds(os.getpid()) - before == pytest.approx(0.2, abs=0.1)
