"""How a service's process runs: uvloop, signals, exit status."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import uvloop


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
