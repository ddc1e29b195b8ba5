"""How the process of a service runs: event loop, signals, exit status."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from pagewire.lifecycle.terminal import is_at_terminal
from pagewire.lifecycle.watchdog import Watchdog, event_loop

log = logging.getLogger(__name__)

# When the event loop is stuck for this long, the stacks are logged; after twice as long the process
# ends.
LOOP_SECONDS = 10.0


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop. SIGTERM and SIGINT set `stop`; a second signal ends the process
    at once, even with open requests. SIGHUP has no effect, unless `main` handles it.

    A process whose event loop is stuck ends with status 1, so that its supervisor restarts it.
    """
    # Imported modules are never freed. Without freeze, every full collection would traverse them,
    # which blocks the event loop for 20 to 40 ms.
    gc.collect()
    gc.freeze()
    uvloop.run(_with_signals(main))


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            # Not an exception, which would wait for open streams, as the first signal does.
            log.warning("a second signal: ending at once, open requests are cut off")
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if not is_at_terminal():  # else the service ends with it
        no_keys = "SIGHUP: this process has no API keys to read again"
        loop.add_signal_handler(signal.SIGHUP, log.info, no_keys)
    watchdog = Watchdog([event_loop(loop)], LOOP_SECONDS, end_process)
    try:
        await main(stop)
    finally:
        watchdog.close()


def essential(
    task: "asyncio.Task[None]", on_fatal: Callable[[BaseException], object] | None = None
) -> "asyncio.Task[None]":
    """Marks a task without which the process cannot work, and returns it.

    If the task raises an exception, `on_fatal` receives it. By default that ends the process, which
    would look healthy otherwise.
    """

    def on_done(done: "asyncio.Task[None]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            (on_fatal or end_process)(error)

    task.add_done_callback(on_done)
    return task


def end_process(error: BaseException) -> NoReturn:
    """Logs an error that the process cannot recover from, and exits with status 1 at once."""
    log.critical("fatal: %s: %s", type(error).__name__, error, exc_info=error)
    logging.shutdown()
    os._exit(1)
