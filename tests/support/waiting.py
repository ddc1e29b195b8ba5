"""Waiting for something to become true."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits for a condition; AssertionError if it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """The same outside an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
