"""A TCP proxy between two processes that can cut, freeze, slow and corrupt its connections."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator


class TcpProxy:
    """Listens on a free port and forwards to `target`, host:port or unix:PATH."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay = 0.0
        self._rng: random.Random | None = None
        self._interval = self._corrupt_at = 0.0
        self.corrupted_bytes = 0

    async def start(self) -> str:
        """Listens; returns the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        """Ends every connection and stops listening."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def freeze(self, seconds: float) -> None:
        """Forwards nothing for `seconds`; connections stay open."""
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._flowing.set()

    async def slow(self, seconds: float, delay: float = 0.05) -> None:
        """For `seconds`, delays all data by `delay` seconds."""
        self._delay = delay
        await asyncio.sleep(seconds)
        self._delay = 0.0

    def corrupt(self, rng: random.Random, interval: float) -> None:
        """Changes a byte about every `interval` seconds, in either direction."""
        self._rng, self._interval = rng, interval
        self._corrupt_at = time.monotonic() + rng.uniform(0, interval)

    def stop_corrupting(self) -> None:
        """Forwards all bytes unchanged again."""
        self._rng = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            other_reader, other_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        else:
            self._writers.add(other_writer)
            await asyncio.gather(self._pass(reader, other_writer), self._pass(other_reader, writer))
            self._writers.discard(other_writer)
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.target.startswith("unix:"):
            return await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        host, _, port = self.target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self._delay:
                    await asyncio.sleep(self._delay)
                await self._flowing.wait()
                writer.write(self._corrupted(data))
                await writer.drain()
        writer.transport.abort()

    def _corrupted(self, data: bytes) -> bytes:
        rng = self._rng
        if rng is None or time.monotonic() < self._corrupt_at or rng.random() < 0.5:
            return data
        self.corrupted_bytes += 1
        self._corrupt_at = time.monotonic() + self._interval * rng.uniform(0.5, 1.5)
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        return bytes(changed)


@contextlib.asynccontextmanager
async def tcp_proxies(*targets: str) -> AsyncIterator[list[TcpProxy]]:
    """A proxy for each target, until the end of the block."""
    proxies = [TcpProxy(target) for target in targets]
    for proxy in proxies:
        await proxy.start()
    try:
        yield proxies
    finally:
        for proxy in proxies:
            await proxy.close()
