"""Processes that a process has started."""

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The children that a process's first thread has started, in their order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
