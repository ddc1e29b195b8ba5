"""`benchmarks/overload.py` at a smaller scale: goodput holds while most requests are refused."""

import subprocess
import sys
from pathlib import Path

from support.rows import values

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overload.py"


def test_goodput_holds_at_ten_times_the_load(tmp_path: Path) -> None:
    output = tmp_path / "overload.jsonl"
    command = [sys.executable, str(BENCHMARK), "--seconds=6", "--phase-seconds=3", "--tried=1.0"]
    # What is measured is the bound of the queue, not how busy this machine is.
    command += ["--slo-ttft-ms=4000", "--slo-tpot-ms=400"]
    done = subprocess.run(
        [*command, f"--output={output}"], capture_output=True, text=True, check=False, timeout=150
    )
    assert output.exists(), done.stderr
    result = values(output)
    assert result["goodput_of_peak"] > 0.7, done.stdout
    assert result["overload/refused"] > result["overload/requests"] / 2
    within, refused = (result[f"overload/gateway_refusals_by_bound/{n}"] for n in ("0.05", "+Inf"))
    assert within > 0.9 * refused > 0
    retry_after = {v for k, v in result.items() if k.startswith("overload/retry_after_seconds/")}
    assert retry_after <= set(range(1, 11))
    for phase in ("peak", "overload", "after"):
        assert result[f"{phase}/other_failures"] == 0, done.stderr
    left_over = {name: v for name, v in result.items() if name.startswith("left_over/")}
    assert len(left_over) == 5
    assert not any(left_over.values()), left_over
