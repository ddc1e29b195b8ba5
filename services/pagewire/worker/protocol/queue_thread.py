"""A thread that runs queued calls one after another."""

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from pagewire.lifecycle.watchdog import Watched

# Seconds that a thread may hold the interpreter while another one waits for it. The default of
# 5 ms is longer than many steps.
SWITCH_INTERVAL = 0.0002

T = TypeVar("T")


class QueueThread:
    """Runs calls in the order they were posted, on a thread of its own."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` runs on this thread with the exception of a posted call."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_error = on_error
        # Counts of calls. They differ while a call is running.
        self.begun = self.ended = 0
        # A daemon, so that the process can end while the model is still loading.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], object]) -> None:
        """Queues `call`; does not wait."""
        self._calls.put(call)

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `function`; returns a future of the running event loop for its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result)

        self.post(run)
        return future

    def watched(self) -> Watched:
        """For a watchdog: reports a call that does not end."""
        return Watched(
            f"the {self._thread.name}", lambda: self.ended, lambda: self.begun > self.ended
        )

    def close(self) -> None:
        """Runs the calls posted so far, then ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.begun += 1
            try:
                call()
            except BaseException as error:
                self._on_error(error)
            self.ended += 1


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.cancelled():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
