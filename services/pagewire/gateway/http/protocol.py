"""HTTP/1.1 on one connection, with bounds on what comes before a request's body, and on how long
an answer may stay unread.

uvicorn leaves them to a proxy: without them a head may be as long, and take as long, as its sender
likes, and who never reads holds a request open for ever.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagewire.gateway.errors import ApiError

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 60.0
# Where Linux has `tcpi_bytes_acked` in what TCP_INFO gives.
_BYTES_ACKED = struct.Struct("120xQ")


class HttpProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431), too slow (the connection closes) or no HTTP (400).

    The connection is reset when an answer waits and not a byte of it is taken for some time.
    """

    head_bytes = HEAD_BYTES
    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS
    _taken = 0  # bytes, as of the last look
    _unread_timer: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _incoming = 0  # bytes of the head that is not complete yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of a body, as they came in one read, which may have tens of thousands of them: uvicorn
        # copies for each what it has so far.
        self._pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection without any request is closed too."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._head_is_there()
        self._forget_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what a head has, complete or not."""
        awaited = self._timer
        super().data_received(data)
        self._pass_pieces_on()
        # A head that began behind a request in this very data is counted from the next on.
        if awaited is not None and awaited is self._timer and not self.transport.is_closing():
            self._incoming += len(data)
            if self._incoming > self.head_bytes:
                self._refuse(_too_large(self.head_bytes))

    def pause_writing(self) -> None:
        """More waits than the client takes."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self._forget_unread()
        super().resume_writing()

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

    def on_body(self, body: bytes) -> None:
        """A piece of a body, or all of it."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The end of a request; another one may follow in the same read."""
        self._pass_pieces_on()
        super().on_message_complete()

    def _pass_pieces_on(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            super().on_body(b"".join(pieces))

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take; also after a refusal, which was sent already."""
        if not self.transport.is_closing():
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def _await_head(self) -> None:
        if self._timer is None:
            close: Callable[[], Any] = self.transport.close
            self._timer = self.loop.call_later(self.head_seconds, close)

    def _look_again(self) -> None:
        self._taken = self._bytes_taken()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self._look_at_unread)

    def _look_at_unread(self) -> None:
        if self._bytes_taken() > self._taken:
            self._look_again()
        else:
            self.transport.abort()

    def _bytes_taken(self) -> int:
        """What the client's machine has acknowledged.

        The transport's buffer does not show that a client reads slowly: the kernel holds megabytes
        and asks for more only when a third of them is gone, and TLS has buffers of its own.
        """
        with self.transport.get_extra_info("socket").dup() as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (acknowledged,) = _BYTES_ACKED.unpack(info)
        return int(acknowledged)

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

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
