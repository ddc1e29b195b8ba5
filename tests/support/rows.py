"""Result files as tests read them."""

from pathlib import Path

from pagewire.bench.results import read_rows


def values(path: Path) -> dict[str, float]:
    """The figures of a file by name; no name comes twice."""
    rows = read_rows(path)
    found = {row.name: row.value for row in rows}
    assert len(found) == len(rows)
    return found
