"""`pagewire bench control` with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "'fast' is not a scenario; give one or more of throughput, busy" in done.stderr
