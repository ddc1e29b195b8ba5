"""What the benchmarks compute from what they saw."""

import asyncio
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pagewire.bench.http import split
from pagewire.bench.http_load import LoadPlan, Timing, _time_chunks, words
from pagewire.bench.latency import summarize, summary_text
from pagewire.bench.offline import Request, read_requests
from pagewire.bench.results import Figure, figures_of, read_rows, write_rows
from pagewire.cli.errors import CommandError
from pagewire.objectives import Objectives


def timing(started: float, ttft: float, itls: list[float], tokens: int) -> Timing:
    return Timing(started, ttft, ttft + sum(itls), itls, prompt_tokens=10, output_tokens=tokens)


def test_figures_follow_their_definitions() -> None:
    timings = [
        timing(100.0, 0.1, [0.2, 0.2], 5),  # TPOT 0.4 / 4
        timing(100.5, 0.3, [0.5], 2),  # TPOT 0.5
        timing(100.2, 0.2, [], 1),  # no TPOT
        Timing(99.0, error="refused"),
    ]
    summary = summarize(timings, Objectives(ttft_ms=250, tpot_ms=200))
    assert (summary["requests"], summary["failed"]) == (4, 1)
    assert summary["seconds"] == pytest.approx(1.3)  # 100.0 to 101.3
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (30, 8)
    assert summary["output_tokens_per_second"] == pytest.approx(8 / 1.3)
    assert summary["total_tokens_per_second"] == pytest.approx(38 / 1.3)
    assert summary["goodput_requests_per_second"] == pytest.approx(2 / 1.3)
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["tpot_ms"]["median"] == pytest.approx(300)
    assert summary["itl_ms"]["p90"] == pytest.approx(np.percentile([200, 200, 500], 90))
    assert summary["e2e_ms"]["p99"] == pytest.approx(np.percentile([500, 800, 200], 99))
    assert "TPOT" in summary_text(summary)


def test_a_summary_of_nothing_but_failures() -> None:
    summary = summarize([Timing(1.0, error="x")], Objectives())
    assert (summary["failed"], summary["output_tokens_per_second"]) == (1, 0.0)


@pytest.mark.parametrize("processes", [1, 3, 4, 50])
def test_shares_add_up_to_the_plan(processes: int) -> None:
    closed = LoadPlan("u", "m", 8, requests=10, concurrency=7)
    shares = split(closed, processes)
    assert len(shares) == min(processes, 7)
    assert sum(share.requests for share in shares) == 10
    assert sum(share.concurrency or 0 for share in shares) == 7
    assert all(share.requests and share.concurrency for share in shares)
    assert len({share.seed for share in shares}) == len(shares)

    opened = LoadPlan("u", "m", 8, requests=10, concurrency=None, request_rate=6.0)
    assert sum(share.request_rate or 0 for share in split(opened, processes)) == pytest.approx(6)


def test_chunks_without_text_are_not_timed_and_usage_counts_tokens() -> None:
    events = [
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}},
    ]

    async def lines():  # type: ignore[no-untyped-def]
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n"
            yield b"\n"
        yield b"data: [DONE]\n"

    seen = Timing(0.0)
    asyncio.run(_time_chunks(lines(), seen))
    assert (seen.prompt_tokens, seen.output_tokens, len(seen.itls)) == (3, 7, 1)
    assert seen.e2e == pytest.approx(seen.ttft + seen.itls[0])


def test_prompts_differ_by_seed_and_repeat_with_it() -> None:
    assert words(random.Random(1), 5) == words(random.Random(1), 5)
    assert words(random.Random(1), 5) != words(random.Random(2), 5)


def test_requests_are_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n\n')
    assert read_requests(file) == [Request([1, 2], 3)]
    file.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n{"prompt": "x"}\n')
    with pytest.raises(CommandError, match="line 2"):
        read_requests(file)
    file.write_text("\n")
    with pytest.raises(CommandError, match="holds no request"):
        read_requests(file)


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
        ({"value": "1"}, "n: '1' is no number"),
        ({"value": True}, "n: True is no number"),
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
