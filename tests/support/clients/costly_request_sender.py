"""A process that sends costly requests: its work does not delay the event loop of the test.

    python -m support.clients.costly_request_sender TARGET FULL_SIZE

TARGET is JSON, FULL_SIZE 0 or 1. An input line is a number and the name of a request, an output
line the number and the outcome as JSON. Requests are sent concurrently.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

from support.clients.costly_requests import CostlyRequest, Outcome, Target, costly_requests

_NICE = 10  # in production, clients' machines do this work
_WRITING = threading.Lock()


class CostlyRequestSender:
    """The sender's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._next = 0

    async def send(self, name: str) -> Outcome:
        """Sends the request of this name; returns its outcome."""
        assert self._process.stdin is not None
        self._next += 1
        number = self._next
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(f"{number} {name}\n".encode())
        try:
            return await waiting
        finally:
            del self._waiting[number]

    async def read(self) -> None:
        """Delivers outcomes until the process ends."""
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                number, fields = json.loads(line)
                self._waiting[number].set_result(Outcome(**fields))
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(RuntimeError("the sender of costly requests ended"))


@contextlib.asynccontextmanager
async def costly_request_sender(
    target: Target, full_size: bool
) -> AsyncIterator[CostlyRequestSender]:
    """Starts a sender; kills it at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "support.clients.costly_request_sender",
        json.dumps(asdict(target)),
        str(int(full_size)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    sender = CostlyRequestSender(process)
    reading = asyncio.create_task(sender.read())
    try:
        yield sender
    finally:
        process.kill()
        await process.wait()
        await reading


def main() -> None:
    """Sends requests until the input ends."""
    os.nice(_NICE)
    target = Target(**json.loads(sys.argv[1]))
    known = {request.name: request for request in costly_requests(sys.argv[2] == "1")}
    for line in sys.stdin:
        number, _, name = line.strip().partition(" ")
        threading.Thread(target=_send, args=(int(number), known[name], target), daemon=True).start()


def _send(number: int, request: CostlyRequest, target: Target) -> None:
    try:
        outcome = request.send(target)
    except Exception as error:
        outcome = Outcome(0, f"{type(error).__name__}: {error}")
    line = json.dumps((number, asdict(outcome))) + "\n"
    with _WRITING:
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
