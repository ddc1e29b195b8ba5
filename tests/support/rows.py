"""Reads result files of benchmarks."""

from pathlib import Path

from pagewire.bench.results import read_rows


def values(path: Path) -> dict[str, float]:
    """The figures of a file by name; AssertionError if a name occurs twice."""
    rows = read_rows(path)
    found = {row.name: row.value for row in rows}
    assert len(found) == len(rows)
    return found
