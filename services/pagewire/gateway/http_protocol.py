"""HTTP/1.1 on one connection, with bounds on what comes before a request's body.

uvicorn leaves both to a proxy: without them a head may be as long, and take as long, as its
sender likes.
"""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagewire.gateway.errors import ApiError

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class HttpProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431), too slow (the connection closes) or no HTTP (400)."""

    head_bytes = HEAD_BYTES
    head_seconds = HEAD_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _incoming = 0  # bytes of the head that is not complete yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection without any request is closed too."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what a head has, complete or not."""
        super().data_received(data)
        if self._timer is not None and not self.transport.is_closing():
            self._incoming += len(data)
            if self._incoming > self.head_bytes:
                self._refuse(_too_large(self.head_bytes))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Starts the request, unless its head is too large."""
        self._head_is_there()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.head_bytes:
            self._refuse(_too_large(self.head_bytes))
            raise ValueError("the head is too large")  # ends the parsing of this connection
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take; also after a refusal, which was sent already."""
        if not self.transport.is_closing():
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def _await_head(self) -> None:
        if self._timer is None:
            close: Callable[[], Any] = self.transport.close
            self._timer = self.loop.call_later(self.head_seconds, close)

    def _head_is_there(self) -> None:
        self._incoming = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large(limit: int) -> ApiError:
    return ApiError(
        431,
        f"the request's target and headers are larger than {limit} bytes; send fewer",
        code="headers_too_large",
    )
