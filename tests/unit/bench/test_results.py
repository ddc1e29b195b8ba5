"""Result files: rows, units, and their sources."""

import json
import re
from pathlib import Path

import pytest
import torch

from pagewire.bench.results import Figure, figures_of, read_rows, write_rows


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "r.jsonl"
    write_rows(file, [Figure("ratio", 2.5, "ratio")], "pagewire bench none")
    (row,) = read_rows(file)
    assert (row.name, row.value, row.unit) == ("ratio", 2.5, "ratio")
    assert row.command == "pagewire bench none"
    assert row.torch == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
    assert re.search(r"\d+ cores of .+, Python 3\.\d+", row.machine)


def test_a_peers_rows_name_its_release(tmp_path: Path) -> None:
    write_rows(tmp_path / "r.jsonl", [Figure("ratio", 1, "ratio")], "peer", release="Peer 0.26")
    (row,) = read_rows(tmp_path / "r.jsonl")
    assert row.commit == "Peer 0.26"


def test_a_nested_result_becomes_figures_with_units() -> None:
    result = {
        "requests": 3,
        "first_error": None,
        "model": "m",
        "passed": True,
        "seconds": 1.5,
        "ttft_ms": {"p50": 2.0},
        "output_tokens_per_second": 7.0,
        "goodput_per_second": 2.0,
        "copy_tb_per_s": 4.3,
        "resident_mib": {"worker": [1.0, 2.0]},
        "step us of 16 rows": 9.0,
        "growth, %": 5.0,
        "hit_rate": 0.1,
        "stopped for 7 s": 4,
        "refused_within_50_ms": 1.0,
    }
    found = {f.name: (f.value, f.unit) for f in figures_of(result, "run")}
    assert found == {
        "run/requests": (3, "count"),
        "run/seconds": (1.5, "s"),
        "run/ttft_ms/p50": (2.0, "ms"),
        "run/output_tokens_per_second": (7.0, "tokens/s"),
        "run/goodput_per_second": (2.0, "requests/s"),
        "run/copy_tb_per_s": (4.3, "TB/s"),
        "run/resident_mib/worker/1": (1.0, "MiB"),
        "run/resident_mib/worker/2": (2.0, "MiB"),
        "run/step us of 16 rows": (9.0, "us"),
        "run/growth, %": (5.0, "%"),
        "run/hit_rate": (0.1, "ratio"),
        "run/stopped for 7 s": (4, "count"),
        "run/refused_within_50_ms": (1.0, "ratio"),
    }


ROW = {
    "name": "n",
    "value": 1.0,
    "unit": "ms",
    "date": "2026-11-24",
    "commit": "abcdef0",
    "machine": "2 cores",
    "torch": None,
    "triton": None,
    "command": "c",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "1"}, "n: '1' is not a number"),
        ({"value": True}, "n: True is not a number"),
        ({"value": float("nan")}, "n: nan is not finite"),
        ({"commit": ""}, "commit is empty"),
        ({"command": None}, "command is empty"),
        ({"note": "x"}, "exactly the fields"),
    ],
)
def test_a_line_that_is_no_row_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, **change})}\n")
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_rows(file)
    file.write_text(json.dumps({name: ROW[name] for name in ROW if name != "triton"}))
    with pytest.raises(ValueError, match="line 1: a row has exactly the fields"):
        read_rows(file)
