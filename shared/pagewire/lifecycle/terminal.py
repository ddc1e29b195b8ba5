"""Whether a process belongs to a terminal."""

import sys


def is_at_terminal() -> bool:
    """Whether a terminal started this process: when it is closed, it sends SIGHUP."""
    return any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
