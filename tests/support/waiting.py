"""Waits for a condition, inside and outside an event loop."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits until a condition is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """`eventually` outside an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
