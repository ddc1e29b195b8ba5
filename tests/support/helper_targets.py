"""Functions that helper processes run in tests."""

import os
import signal
import time
from collections.abc import Callable

from pagewire.errors import invalid


def commands(greeting: str) -> Callable[[bytes], bytes]:
    """A function whose tasks begin with the name of a command."""

    def compute(task: bytes) -> bytes:
        what, _, rest = task.partition(b" ")
        if what == b"echo":
            return greeting.encode() + rest
        if what == b"pid":
            return str(os.getpid()).encode()
        if what == b"begin":  # makes a file when it has begun, then takes some seconds
            path, _, seconds = rest.partition(b" ")
            open(path, "x").close()
            time.sleep(float(seconds))
            return b"slept"
        if what == b"sleep":
            time.sleep(float(rest))
            return b"slept"
        if what == b"refuse":
            raise invalid("prompt", "no such prompt")
        if what == b"fail":
            raise KeyError(rest.decode())
        if what == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError(what)

    return compute


def broken(_argument: object) -> Callable[[bytes], bytes]:
    """A function that cannot be set up."""
    raise OSError("there is no such file")
