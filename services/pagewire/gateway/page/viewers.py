"""The viewers of the engine: all get the same text, once a tick. Without viewers none is made."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.gateway.errors import ApiError

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
MAX_VIEWERS = 32


class Viewers:
    """Sends each viewer the latest text. A slow viewer misses texts and does not delay others."""

    def __init__(
        self,
        make: Callable[[], Awaitable[str]],
        tick: float = TICK_SECONDS,
        most: int = MAX_VIEWERS,
    ) -> None:
        """`make` returns the data of an event; it is called once a tick while there are viewers."""
        self._make = make
        self._tick = tick
        self._most = most
        self._latest = b""
        self._number = 0  # of the latest text
        self._changed = asyncio.Condition()
        self._maker: asyncio.Task[None] | None = None
        self._closed = False
        self.count = 0

    def response(self) -> Response:
        """The stream for a new viewer; ApiError if there are too many, or after `close`."""
        if self._closed:
            raise ApiError(503, "the gateway is shutting down", headers={"connection": "close"})
        if self.count >= self._most:
            raise ApiError(
                429,
                f"{self.count} viewers watch the engine already; close one, or try again later",
                code="too_many_viewers",
            )
        return _ViewerStream(self)

    async def close(self) -> None:
        """Ends all streams, and refuses new ones."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    async def follow(self, receive: Receive, send: Send) -> None:
        """Sends texts until the viewer has gone or `close` is called."""
        self.count += 1
        if self._maker is None:
            self._maker = asyncio.create_task(self._make_forever())
        gone = asyncio.create_task(_until_gone(receive))
        writer = asyncio.create_task(self._write(send))
        try:
            await asyncio.wait((gone, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                await writer
        finally:
            gone.cancel()
            writer.cancel()
            self.count -= 1
            if not self.count and self._maker is not None:
                self._maker.cancel()
                self._maker = None

    async def _make_forever(self) -> None:
        while True:
            try:
                text = await self._make()
            except Exception:
                log.exception("the engine's view cannot be made")
            else:
                async with self._changed:
                    self._latest = f"data: {text}\n\n".encode()
                    self._number += 1
                    self._changed.notify_all()
            await asyncio.sleep(self._tick)

    async def _write(self, send: Send) -> None:
        sent = self._number
        while True:
            async with self._changed:
                while not self._closed and self._number == sent:
                    await self._changed.wait()
            if self._closed:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            sent = self._number
            # This waits while the viewer's connection is full; texts made meanwhile are skipped.
            await send({"type": "http.response.body", "body": self._latest, "more_body": True})


class _ViewerStream(Response):
    media_type = "text/event-stream"

    def __init__(self, viewers: Viewers) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._viewers.follow(receive, send)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
