"""Result files: JSON lines, one row per figure, with the data needed to measure it again.

A row is a flat object with exactly the fields of `Row`. `docs/performance.md` explains them.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from pagewire.cli.errors import CommandError

# The commit of a copy of the source that has no git history.
COMMIT_VARIABLE = "BENCH_COMMIT"

_RATES = {"tokens": "tokens/s", "bytes": "bytes/s", "tb": "TB/s", "tflop": "TFLOP/s"}
_UNITS = {
    "us": "us",
    "microseconds": "us",
    "ms": "ms",
    "s": "s",
    "seconds": "s",
    "minutes": "min",
    "mib": "MiB",
    "tokens/s": "tokens/s",
    "%": "%",
}


class Figure(NamedTuple):
    """A measured number."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and its origin: one line of a result file."""

    name: str
    value: float
    unit: str
    date: str  # YYYY-MM-DD
    commit: str  # of the code that was measured, `+` for changes on top; of a peer its release
    machine: str
    torch: str | None  # None where it is not installed or not known
    triton: str | None
    command: str


def write_rows(path: Path, figures: Iterable[Figure], command: str, release: str = "") -> None:
    """Writes a file of rows; CommandError if that fails. `release` names a measured peer."""
    origin = provenance(command, release)
    write_file(path, rows_text(Row(**figure._asdict(), **origin) for figure in figures))


def rows_text(rows: Iterable[Row]) -> str:
    """The text of a result file."""
    return "".join(
        json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; ValueError names the line that is not one."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def figures_of(result: Mapping[str, Any], *parents: str) -> Iterator[Figure]:
    """The numbers of a nested result, named by the path of their keys.

    Elements of a list count from 1. Texts and missing values are not figures. The last key with a
    unit determines the unit; without one, an integer is a count and any other number a ratio.
    """
    for key, value in result.items():
        path = (*parents, key)
        if isinstance(value, Mapping):
            yield from figures_of(value, *path)
        elif isinstance(value, list):
            yield from figures_of({str(i): each for i, each in enumerate(value, start=1)}, *path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield Figure("/".join(path), value, _unit(path, value))


def command_line() -> str:
    """The command of this process, for its rows."""
    program, *arguments = sys.argv
    script = Path(program)
    if script.name in ("main.py", "__main__.py", "pagewire"):
        words = ["pagewire"]
    else:
        root = Path(__file__).parents[3]
        inside = script.resolve().is_relative_to(root)
        words = ["python", str(script.resolve().relative_to(root)) if inside else script.name]
    return " ".join([*words, *without_folders(arguments)])


def without_folders(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments of a command, with only the file names of absolute paths."""
    for argument in arguments:
        flag, equals, value = argument.rpartition("=")
        yield flag + equals + (Path(value).name if value.startswith("/") else value)


def provenance(command: str, release: str = "") -> dict[str, Any]:
    """The fields of a row for the place, time, code and versions of its measurement."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": release or os.environ.get(COMMIT_VARIABLE) or _commit(),
        "machine": _machine(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "command": command,
    }


def write_file(path: Path, text: str) -> None:
    """Writes a file, and makes its folders; CommandError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error


def _row(given: Any) -> Row:
    names = {field.name for field in fields(Row)}
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"a row has exactly the fields {', '.join(sorted(names))}")
    row = Row(**given)
    empty = [name for name in names - {"value", "torch", "triton"} if not given[name]]
    if empty:
        raise ValueError(f"{min(empty)} is empty")
    if isinstance(row.value, bool) or not isinstance(row.value, int | float):
        raise ValueError(f"{row.name}: {row.value!r} is not a number")
    if not math.isfinite(row.value):
        raise ValueError(f"{row.name}: {row.value!r} is not finite")
    return row


def _unit(path: tuple[str, ...], value: float) -> str:
    for key in reversed(path):
        rate = re.search(r"([a-z]+)_per_s", key)
        if rate:
            return _RATES.get(rate[1], "requests/s")
        # "7 s" and "50_ms" are parts of the figure's name, not its unit.
        words = re.split(r"[^a-z0-9/%]+", re.sub(r"\d[ _][a-z]+", "", key.lower()))
        for word in reversed(words):
            if word in _UNITS:
                return _UNITS[word]
    return "count" if isinstance(value, int) else "ratio"


def _commit() -> str:
    """The commit of the running source, `+` for changes on top."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12"]
    return _output([*command, "--dirty=+", "--exclude=*"]) or "unknown"


def _machine() -> str:
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    names = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    cores = f"{os.cpu_count()} cores of {_cpu_name()}"
    return ", ".join([*names, cores, f"Python {platform.python_version()}"])


def _output(command: list[str]) -> str:
    """The output of a program; empty if the program does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
