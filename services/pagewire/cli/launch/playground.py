"""The supervisor's part of the playground: it ends a worker when the gateway requests it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagewire.cli.launch.supervisor import Supervisor


@asynccontextmanager
async def playground(socket: Path | None, supervisor: Supervisor) -> AsyncIterator[None]:
    """Listens on `socket` inside the block; does nothing without one.

    A line is an object with `kill`, the address of a worker. The answer has the worker's name in
    `killed`, or null if no worker runs there. Only this user may have access to the folder.
    """
    if socket is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wish = json.loads(await reader.readline())
            killed = supervisor.kill_at(wish["kill"])
            writer.write(json.dumps({"killed": killed}).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not a gateway's request: no answer
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, socket)
    try:
        yield
    finally:
        server.close()
