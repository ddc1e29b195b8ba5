"""`benchmarks/overload.py` at a smaller scale: goodput holds while most requests are refused."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overload.py"


def test_goodput_holds_at_ten_times_the_load(tmp_path: Path) -> None:
    output = tmp_path / "overload.json"
    command = [sys.executable, str(BENCHMARK), "--seconds=6", "--phase-seconds=3", "--tried=1.0"]
    # What is measured is the bound of the queue, not how busy this machine is.
    command += ["--slo-ttft-ms=4000", "--slo-tpot-ms=400"]
    done = subprocess.run(
        [*command, f"--output={output}"], capture_output=True, text=True, check=False, timeout=150
    )
    assert output.exists(), done.stderr
    result = json.loads(output.read_text())
    overload = result["overload"]
    assert result["goodput_of_peak"] > 0.7, done.stdout
    assert overload["refused"] > overload["requests"] / 2
    within = overload["gateway_refused_within_seconds"]
    assert within["0.05"] > 0.9 * within["+Inf"] > 0, within
    assert {int(seconds) for seconds in overload["retry_after"]} <= set(range(1, 11))
    for phase in ("peak", "overload", "after"):
        assert result[phase]["other_failures"] == 0, result[phase]["first_other_failure"]
    assert not any(result["left_over"].values()), result["left_over"]
