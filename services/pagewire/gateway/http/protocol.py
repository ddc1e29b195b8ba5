"""HTTP/1.1 on one connection, with limits on a request's head and on unread answers.

uvicorn leaves such limits to a proxy. Without them a client can send a head of any size at any
speed, and a client that never reads keeps a request open forever.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagewire.gateway.errors import ApiError
from pagewire.gateway.http.parser import RequestParser

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 60.0
# One turn of the event loop parses so much at most: 5,461 chunks of one byte, about 2 ms. An answer
# to another client needs several turns.
_PARSED_BYTES = 32 << 10
# The offset of `tcpi_bytes_acked` in the result of TCP_INFO on Linux.
_BYTES_ACKED = struct.Struct("120xQ")


class HttpProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431) or not HTTP (400); closes if a head is too slow.

    Resets the connection if an answer waits and the client reads no byte for some time.
    """

    head_bytes = HEAD_BYTES
    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS
    parser: RequestParser
    flow: "_Flow"
    _acknowledged = 0  # bytes, when the unread timer was started
    _unread_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0  # of the incomplete head

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._unparsed = bytearray()  # for the next turn; it is due unless this is empty
        # Body chunks of one turn, joined before uvicorn gets them. For each of possibly tens of
        # thousands of chunks, uvicorn would copy the whole body so far.
        self._body_chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first head: a connection without a request is closed too."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the data, in several turns of the event loop if there is much of it."""
        is_due = bool(self._unparsed)
        self._unparsed += data
        if not is_due:
            self._parse_part()

    def _parse_part(self) -> None:
        if self.transport.is_closing():
            return
        part = bytes(self._unparsed[:_PARSED_BYTES])
        del self._unparsed[:_PARSED_BYTES]
        self._parse(part)
        if self._unparsed:
            self.flow.hold()
            self.loop.call_soon(self._parse_part)
        else:
            self.flow.release()

    def _parse(self, data: bytes) -> None:
        """Parses the data, and counts the bytes of an incomplete head."""
        timer = self._head_timer
        super().data_received(data)
        self._flush_body()
        # If a head begins after another request in the same data, counting starts with the next.
        if timer is not None and timer is self._head_timer and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.head_bytes:
                self._refuse(_too_large(self.head_bytes))

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than the answer is written."""
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        """Called when the client has read most of the written bytes."""
        self._stop_unread_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Starts the timer at the first byte of a request."""
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Starts the request, unless its head is too large."""
        self._stop_head_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.head_bytes:
            self._refuse(_too_large(self.head_bytes))
            raise ValueError("the head is too large")  # ends the parsing of this connection
        if self.parser.offers_upgrade:
            return
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Keeps a chunk of a body until the end of the turn."""
        self._body_chunks.append(body)

    def on_message_complete(self) -> None:
        """Ends a request; another one may follow in the same turn."""
        if not self.parser.offers_upgrade:
            self._flush_body()
            super().on_message_complete()

    def _flush_body(self) -> None:
        if self._body_chunks:
            chunks, self._body_chunks = self._body_chunks, []
            super().on_body(b"".join(chunks))

    def send_400_response(self, msg: str) -> None:
        """Refuses data that the parser cannot read. Also called after `_refuse` has closed."""
        if not self.transport.is_closing():
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            close: Callable[[], Any] = self.transport.close
            self._head_timer = self.loop.call_later(self.head_seconds, close)

    def _stop_head_timer(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_unread_timer(self) -> None:
        self._acknowledged = self._bytes_acknowledged()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self._check_unread)

    def _check_unread(self) -> None:
        if self._bytes_acknowledged() > self._acknowledged:
            self._start_unread_timer()
        else:
            self.transport.abort()

    def _bytes_acknowledged(self) -> int:
        """The bytes that the client's machine has acknowledged.

        The transport's buffer does not show whether a slow client still reads. The kernel buffers
        megabytes, and asks for more only when a third of them is sent. TLS has its own buffers.
        """
        with self.transport.get_extra_info("socket").dup() as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (acknowledged,) = _BYTES_ACKED.unpack(info)
        return int(acknowledged)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Flow(FlowControl):
    """Reads nothing while `hold` applies, even if uvicorn resumes the reading."""

    _held = False

    def hold(self) -> None:
        """Stops the reading until `release`."""
        if not self._held:
            self._held = True
            if not self._transport.is_closing():
                self._transport.pause_reading()

    def release(self) -> None:
        """Reads again, unless uvicorn has stopped the reading."""
        if self._held:
            self._held = False
            if not self.read_paused and not self._transport.is_closing():
                self._transport.resume_reading()

    def resume_reading(self) -> None:
        """Reads again once `hold` applies no more."""
        if self._held:
            self.read_paused = False
        else:
            super().resume_reading()


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Ends the answer by closing the connection: HTTP/1.0 has no chunks (RFC 9112, 6.1)."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_plain  # type: ignore[method-assign]


def _too_large(limit: int) -> ApiError:
    return ApiError(
        431,
        f"the request's target and headers are larger than {limit} bytes; send fewer",
        code="headers_too_large",
    )
