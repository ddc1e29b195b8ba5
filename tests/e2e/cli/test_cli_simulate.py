"""`pagewire simulate` as a user runs it, on small traces and on the start of a real one."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.bench.results import figures_of, read_rows
from support.rows import values

MOONCAKE = Path(__file__).parents[2] / "data" / "mooncake_conversation_300.jsonl"


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire.cli.main", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Eight conversations of four turns under one system prompt of 512 tokens."""
    path = tmp_path / "talks.jsonl"
    with path.open("w") as file:
        for turn in range(4):
            for talk in range(8):
                ids = [0, *(100 * (talk + 1) + t for t in range(turn + 1))]
                row = {
                    "timestamp": 1000 * (8 * turn + talk),
                    "input_length": 512 * len(ids),
                    "output_length": 20,
                    "hash_ids": ids,
                }
                file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """300 requests of 200 tokens in; most outputs are short, each tenth is long."""
    path = tmp_path / "requests.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for i in range(300):
            writer.writerow([f"2023-11-16 18:15:{i // 10:02}.1234567", 200, 10 if i % 10 else 200])
    return path


def test_cache_sizes_are_compared_and_plotted(conversations: Path, tmp_path: Path) -> None:
    plot, output = tmp_path / "p.svg", tmp_path / "r.jsonl"
    flags = ("--cache-blocks=0,200", f"--plot={plot}", f"--output={output}", "--json")
    done = simulate("--trace", conversations, *flags)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    ideal = printed["ideal_block_hit_rate"]
    unlimited = printed["runs"]["prefix-aware, unlimited blocks"]
    small = printed["runs"]["prefix-aware, 200 blocks"]
    assert unlimited["block_hit_rate"] == ideal > small["block_hit_rate"] > 0
    assert unlimited["finished"] == small["finished"] == 32
    assert plot.read_text().startswith("<svg")
    figures = figures_of({"ideal_block_hit_rate": ideal, **printed["runs"]})
    assert values(output) == {figure.name: figure.value for figure in figures}
    (command,) = {row.command for row in read_rows(output)}
    assert "--cache-blocks=0,200 --plot=p.svg --output=r.jsonl" in command
    assert str(tmp_path) not in command


def test_routings_are_compared_in_a_table(conversations: Path) -> None:
    flags = ("--workers=4", "--routing=least-loaded,round-robin", "--profile=h200-qwen3-0.6b")
    done = simulate("--trace", conversations, *flags)
    assert done.returncode == 0, done.stderr
    assert "ideal block hit rate" in done.stdout
    for row in (
        "round-robin",
        "TTFT p99, ms",
        "TPOT p50, ms",
        "goodput",
        "KV waste",
        "preemptions",
    ):
        assert row in done.stdout


def test_continuous_batching_beats_static_batches(requests: Path) -> None:
    flags = ("--compare-static", "--num-slots=32", "--memory-threshold=1", "--json")
    done = simulate("--trace", requests, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ratio"] > 2
    assert result["ratio"] > result["ratio_without_finished_rows"] > 1
    assert result["pressure_kv_utilization"] > 0.85
    assert result["pressure_kv_waste"] < 0.04
    assert result["pressure_finished"] == 300


def test_more_load_costs_goodput(requests: Path) -> None:
    runs = []
    for rate in (1, 100):
        flags = (f"--rate={rate}", "--num-slots=4", "--tpot-slo-ms=20", "--ttft-slo-ms=500")
        runs.append(json.loads(simulate("--trace", requests, *flags, "--json").stdout)["runs"])
    calm, busy = (next(iter(run.values())) for run in runs)
    assert calm["goodput_requests_per_second"] == pytest.approx(calm["requests_per_second"])
    assert busy["goodput_requests_per_second"] < busy["requests_per_second"] / 2
    assert busy["ttft_ms"]["p99"] > 2 * calm["ttft_ms"]["p99"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--routing=random"], "'random': give one of"),
        (["--policy=lottery"], "lottery"),
        (["--workers=1000000000"], "are 1000000000 simulated workers; give 4096 at most"),
        (["--workers=2049", "--schedulers=2"], "are 4098 simulated workers; give 4096 at most"),
        (["--profile=abacus"], "profile 'abacus' does not exist"),
        (["--cache-blocks=0,1"], "'1' is not a number of blocks"),
        (["--cache-blocks=9"], "none of the 32 requests fits the 9 KV blocks of a worker"),
        (["--trace=/nowhere.csv"], "/nowhere.csv"),
        (["--output=/dev/null/r.json"], "/dev/null/r.json: cannot be written"),
        (["--plot=/dev/null/p.svg"], "/dev/null/p.svg: cannot be written"),
    ],
)
def test_bad_flags_are_named(conversations: Path, flags: list[str], message: str) -> None:
    done = simulate("--trace", conversations, *flags)
    assert done.returncode in (1, 2)
    assert message in done.stderr


def test_the_first_minutes_of_a_production_trace_reach_their_ideal_hit_rate() -> None:
    flags = ("--cache-blocks=0", "--block-size=512", "--profile=h200-qwen3-0.6b")
    done = simulate("--trace", MOONCAKE, *flags, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (run,) = result["runs"].values()
    assert run["block_hit_rate"] == pytest.approx(result["ideal_block_hit_rate"], abs=0.003)


def test_preemption_is_compared_with_a_plain_queue(requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    flags = ("--compare-preemption", "--host-memory-gb=1", "--num-slots=32", f"--output={output}")
    done = simulate("--trace", requests, "--memory-threshold=1.0", *flags)
    assert done.returncode == 0, done.stderr
    found = values(output)

    def each(figure: str) -> list[float]:
        runs = ("plain_queue", "recompute", "host tier of 1 GB")
        return [found.get(f"{run}/{figure}", 0) for run in runs]

    assert each("finished") == [300] * 3
    plain, recompute, host = each("preemptions")
    assert plain == 0 < min(recompute, host)
    pattern = r"plain_queue_settings/\d+/output_tokens_per_second"
    rates = [rate for name, rate in found.items() if re.fullmatch(pattern, name)]
    assert len(rates) == 6
    assert each("output_tokens_per_second")[0] == max(rates)
    _, recompute, host = each("loaded_blocks")
    assert recompute == 0 < host
    assert min(each("of_best_plain_queue")[1:]) > 0.6
    assert "plain_queue" in done.stdout


def test_a_small_batch_is_compared_with_the_queues_that_there_are(requests: Path) -> None:
    done = simulate("--trace", requests, "--compare-preemption", "--num-slots=2", "--requests=9")
    assert done.returncode == 0, done.stderr
    assert "9 finished" in done.stdout


def test_host_memory_is_compared_and_refused_where_it_is_no_number(
    conversations: Path, tmp_path: Path
) -> None:
    done = simulate(
        "--trace", conversations, "--host-memory-gb=0,1", "--cache-blocks=200", "--json"
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    without = runs["prefix-aware, 200 blocks"]
    with_host = runs["prefix-aware, 200 blocks, 1 GB on the host"]
    assert without["host_hit_rate"] == 0 < with_host["host_hit_rate"]
    assert without["token_hit_rate"] < with_host["token_hit_rate"]
    refused = simulate("--trace", conversations, "--host-memory-gb=much")
    assert refused.returncode != 0
    assert "'much' is not a number of gigabytes" in refused.stderr
