"""A process that sends what it is told: its own work and waits are not in the figures of others.

    python -m support.clients.hostile_client TARGET FULL_SIZE

TARGET is JSON, FULL_SIZE 0 or 1. Each line in is a number and the name of a shape, each line out
the number and the outcome as JSON; shapes are sent side by side as they come.
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

from support.clients.hostile_shapes import Outcome, Shape, Target, shapes

_NICE = 10  # others' machines do this work
_WRITING = threading.Lock()


class HostileClient:
    """The process, as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._next = 0

    async def send(self, name: str) -> Outcome:
        """What comes back to the shape of this name."""
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
        """Hands outcomes to whoever waits, until the process ends."""
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                number, fields = json.loads(line)
                self._waiting[number].set_result(Outcome(**fields))
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(RuntimeError("the hostile client ended"))


@contextlib.asynccontextmanager
async def hostile_client(target: Target, full_size: bool) -> AsyncIterator[HostileClient]:
    """Starts one; ends it with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "support.clients.hostile_client",
        json.dumps(asdict(target)),
        str(int(full_size)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    client = HostileClient(process)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        process.kill()
        await process.wait()
        await reading


def main() -> None:
    """Sends shapes until its input ends."""
    os.nice(_NICE)
    target = Target(**json.loads(sys.argv[1]))
    known = {shape.name: shape for shape in shapes(sys.argv[2] == "1")}
    for line in sys.stdin:
        number, _, name = line.strip().partition(" ")
        threading.Thread(target=_send, args=(int(number), known[name], target), daemon=True).start()


def _send(number: int, shape: Shape, target: Target) -> None:
    try:
        outcome = shape.send(target)
    except Exception as error:
        outcome = Outcome(0, f"{type(error).__name__}: {error}")
    line = json.dumps((number, asdict(outcome))) + "\n"
    with _WRITING:
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
