"""The supervisor's side of the playground: it ends a worker when the gateway asks for that."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagewire.cli.launch.supervisor import Supervisor


@asynccontextmanager
async def playground(socket: Path | None, supervisor: Supervisor) -> AsyncIterator[None]:
    """Listens on `socket` inside the block; does nothing without one.

    A line is an object with `kill`, the address of a worker. The answer has its name in `killed`,
    or null if none runs there. The folder of the socket must be this user's only.
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
            pass  # no gateway asks so: it gets no answer
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, socket)
    try:
        yield
    finally:
        server.close()
