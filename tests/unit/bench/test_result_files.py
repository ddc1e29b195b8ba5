"""The committed figures: every row is complete, every file linked, every plot drawn from rows."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from pagewire.bench.results import Row, read_rows, without_folders
from pagewire.cli.commands.bench.offline import read_requests

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
FILES = [*RESULTS.rglob("*.*"), *BENCHMARKS.glob("peers/*/*.jsonl")]
ROWS = [path for path in FILES if path.suffix == ".jsonl"]


def is_full_history() -> bool:
    command = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "false"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linked_files() -> set[Path]:
    """Every file that a page of docs/ links to."""
    found = set()
    for page in (ROOT / "docs").rglob("*.md"):
        targets = re.findall(r"\]\(([^)#]+)", page.read_text())
        found |= {(page.parent / target).resolve() for target in targets if ":" not in target}
    return found


def test_results_are_rows_and_plots() -> None:
    assert len(ROWS) > 15
    assert {path.suffix for path in FILES} == {".jsonl", ".svg"}


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_every_row_is_whole_and_none_comes_twice(path: Path) -> None:
    rows = read_rows(path)
    assert rows
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row.date) for row in rows)

    def key(row: Row) -> tuple[str, ...]:
        return row.name, row.commit, row.machine, row.command

    twice = [each for each, count in Counter(map(key, rows)).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_linked_from_a_page(path: Path) -> None:
    assert path.resolve() in linked_files()


def test_every_script_that_a_row_names_is_there() -> None:
    commands = {row.command for path in ROWS for row in read_rows(path)}
    scripts = {word for command in commands for word in command.split() if word.endswith(".py")}
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


@pytest.mark.skipif(not is_full_history(), reason="needs the full git history")
def test_every_commit_that_a_row_names_is_an_ancestor() -> None:
    commits = {
        row.commit.rstrip("+") for path in RESULTS.glob("*.jsonl") for row in read_rows(path)
    }
    for commit in sorted(commits):
        command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0, commit


def test_the_plot_of_offline_speed_is_drawn_from_the_rows(tmp_path: Path) -> None:
    plots = script("peers/plot_offline")
    assert plots.svg(plots.ratios()) == plots.PLOT.read_text()


def test_simulated_figures_are_of_the_flags_of_their_script() -> None:
    simulations = script("simulations")
    names = {path.stem.removeprefix("simulate-") for path in RESULTS.glob("simulate-*")}
    assert set(simulations.SIMULATIONS) == names
    for name in names:
        words = without_folders(simulations.command(name, Path("/traces")))
        rows = read_rows(RESULTS / f"simulate-{name}.jsonl")
        assert {row.command for row in rows} == {" ".join(["pagewire", *words])}


def test_requests_are_written_as_the_offline_benchmark_reads_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    command = [sys.executable, str(BENCHMARKS / "write_requests.py"), f"--model={tmp_path}"]
    command += [f"--folder={tmp_path}", "--only", "single", "long_context"]
    subprocess.run(command, check=True, capture_output=True)
    for name, tokens, outputs in (("single", 128, 512), ("long_context", 120_000, 256)):
        (request,) = read_requests(tmp_path / f"{name}.jsonl")
        assert (len(request.prompt_token_ids), request.max_tokens) == (tokens, outputs)
