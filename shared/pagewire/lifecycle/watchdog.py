"""A thread that detects when an event loop or another thread of its process stalls."""

import asyncio
import faulthandler
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire.lifecycle.stall_detector import StallDetector

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class StalledError(RuntimeError):
    """A stall was so long that the process must end."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that must make progress while it is busy.

    `progress` returns a number that grows, `busy` whether work is pending. The watchdog's thread
    calls both.
    """

    name: str
    progress: Callable[[], int]
    busy: Callable[[], bool]


class Watchdog:
    """Polls each watched thing, at least twice a second, from a thread of its own."""

    def __init__(
        self,
        watched: Sequence[Watched],
        seconds: float,
        on_fatal: Callable[[BaseException], None],
        on_change: Callable[[bool], None] = lambda _: None,
        *,
        slow_seconds: float | None = None,
        on_slow: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """After `slow_seconds` without progress, `on_slow(True)` is called, and `on_slow(False)`
        when everything makes progress again. After `seconds`, the stacks of all threads are logged
        and `on_change(False)` is called, later `on_change(True)`. After twice `seconds`, `on_fatal`
        is called. All callbacks run on the watchdog's thread.
        """
        shortest = slow_seconds or seconds
        self._interval = min(POLL_SECONDS, shortest / 4)
        slow_polls = math.ceil(shortest / self._interval)
        polls = math.ceil(seconds / self._interval)
        self._watched = [
            (thing, StallDetector(slow_polls), StallDetector(polls), StallDetector(2 * polls))
            for thing in watched
        ]
        self._seconds = seconds
        self._on_slow = on_slow
        self._slow = False
        self._on_fatal = on_fatal
        self._on_change = on_change
        self._stalled: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; no callback is called after this."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            any_slow = False
            for thing, slow, stalled, fatal in self._watched:
                progress, busy = thing.progress(), thing.busy()
                any_slow |= slow.poll(progress, busy)
                self._note(thing.name, stalled.poll(progress, busy))
                if fatal.poll(progress, busy):
                    seconds = 2 * self._seconds
                    self._on_fatal(
                        StalledError(f"{thing.name} has made no progress for {seconds:g} s")
                    )
                    return
            if any_slow != self._slow:
                self._slow = any_slow
                self._on_slow(any_slow)

    def _note(self, name: str, stalled: bool) -> None:
        if stalled and name not in self._stalled:
            self._stalled.add(name)
            log.critical("%s has made no progress for %g s; stacks follow", name, self._seconds)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            if len(self._stalled) == 1:
                self._on_change(False)
        elif not stalled and name in self._stalled:
            self._stalled.remove(name)
            log.warning("%s makes progress again", name)
            if not self._stalled:
                self._on_change(True)


def event_loop(loop: asyncio.AbstractEventLoop) -> Watched:
    """An event loop, which is always busy: each poll schedules one more call on it."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    def progress() -> int:
        seen = calls
        if not loop.is_closed():
            loop.call_soon_threadsafe(count)
        return seen

    return Watched("the event loop", progress, lambda: not loop.is_closed())
