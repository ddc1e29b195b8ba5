"""A thread that notices when something in its process stands still, and says so while it does."""

import asyncio
import faulthandler
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire.lifecycle.stall import Stall

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class StalledError(RuntimeError):
    """Something has stood still for so long that it will not move again."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that must move: `moves` grows when it does, `waiting` is whether it has to."""

    name: str
    moves: Callable[[], int]
    waiting: Callable[[], bool]


class Watchdog:
    """Looks at each thing twice a second, from a thread of its own."""

    def __init__(
        self,
        watched: Sequence[Watched],
        seconds: float,
        on_fatal: Callable[[BaseException], None],
        on_change: Callable[[bool], None] = lambda _: None,
        *,
        doubt_seconds: float | None = None,
        on_doubt: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """After `seconds` without a move all stacks are written to the log and `on_change(False)`
        is called, `on_change(True)` when everything moves again; after twice the time `on_fatal`.
        After `doubt_seconds`, which are fewer, `on_doubt(True)`, and then `on_doubt(False)`.
        All are called on the watchdog's thread.
        """
        self._interval = min(LOOK_SECONDS, (doubt_seconds or seconds) / 4)
        looks = math.ceil(seconds / self._interval)
        doubtful = math.ceil((doubt_seconds or seconds) / self._interval)
        self._watched = [
            (thing, Stall(doubtful), Stall(looks), Stall(2 * looks)) for thing in watched
        ]
        self._seconds = seconds
        self._on_doubt = on_doubt
        self._doubted = False
        self._on_fatal = on_fatal
        self._on_change = on_change
        self._stalled: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; nothing is called any more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            doubted = False
            for thing, slow, stall, hopeless in self._watched:
                moves, waiting = thing.moves(), thing.waiting()
                doubted |= slow.look(moves, waiting)
                self._note(thing.name, stall.look(moves, waiting))
                if hopeless.look(moves, waiting):
                    seconds = 2 * self._seconds
                    self._on_fatal(StalledError(f"{thing.name} has not moved for {seconds:g} s"))
                    return
            if doubted != self._doubted:
                self._doubted = doubted
                self._on_doubt(doubted)

    def _note(self, name: str, stalled: bool) -> None:
        if stalled and name not in self._stalled:
            self._stalled.add(name)
            log.critical("%s has not moved for %g s; the stacks:", name, self._seconds)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            if len(self._stalled) == 1:
                self._on_change(False)
        elif not stalled and name in self._stalled:
            self._stalled.remove(name)
            log.warning("%s moves again", name)
            if not self._stalled:
                self._on_change(True)


def event_loop(loop: asyncio.AbstractEventLoop) -> Watched:
    """An event loop, which must always find time for one more call."""
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    def moves() -> int:
        seen = turns
        if not loop.is_closed():
            loop.call_soon_threadsafe(turn)
        return seen

    return Watched("the event loop", moves, lambda: not loop.is_closed())
