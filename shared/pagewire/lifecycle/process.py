"""How a service's process runs: uvloop, signals, exit status."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from pagewire.lifecycle.watchdog import Watchdog, event_loop

log = logging.getLogger(__name__)


# An event loop that is stuck for so long has its stacks in the log; for twice as long, it ends.
LOOP_SECONDS = 10.0


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop; SIGTERM and SIGINT set `stop`, a second one ends at once.

    A process whose event loop is stuck ends with status 1: whoever keeps it starts a sound one.
    """
    # What was imported stays for good. A collection that goes through it all holds the event loop
    # up for 20 to 40 ms, again and again.
    gc.collect()
    gc.freeze()
    uvloop.run(_with_signals(main))


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    watchdog = Watchdog([event_loop(loop)], LOOP_SECONDS, end_process)
    try:
        await main(stop)
    finally:
        watchdog.close()


def essential(
    task: "asyncio.Task[None]", on_fatal: Callable[[BaseException], object] | None = None
) -> "asyncio.Task[None]":
    """A task without which the process is of no use: better none than one that looks healthy.

    `on_fatal` gets what the task raises; by default it ends the process.
    """

    def on_done(done: "asyncio.Task[None]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            (on_fatal or end_process)(error)

    task.add_done_callback(on_done)
    return task


def end_process(error: BaseException) -> NoReturn:
    """Ends the process at once: without its device or its threads it must not look healthy."""
    log.critical("fatal: %s: %s", type(error).__name__, error, exc_info=error)
    logging.shutdown()
    os._exit(1)
