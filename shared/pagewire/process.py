"""How a service's process runs: uvloop, signals, exit status."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

log = logging.getLogger(__name__)


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop; SIGTERM and SIGINT set `stop`, a second one ends at once."""
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
    await main(stop)


def end_process(error: BaseException) -> NoReturn:
    """Ends the process at once: without its device or its threads it must not look healthy."""
    log.critical("fatal: %s: %s", type(error).__name__, error, exc_info=error)
    logging.shutdown()
    os._exit(1)
