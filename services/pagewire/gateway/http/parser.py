"""The parser of a connection's requests, for a server that supports HTTP/1.1 only."""

from array import array
from collections.abc import Iterable
from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class _Requests(Protocol):
    """The part of the protocol that the parser needs."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(HttpRequestParser):
    """Ignores a request's offer of another protocol (`Upgrade: h2c`).

    A server may ignore such an offer (RFC 9110, 7.8), and Java's HTTP client makes it with every
    request to a server without TLS. httptools would treat the body as data of the other protocol.
    """

    def __init__(self, protocol: _Requests) -> None:
        super().__init__(protocol)
        self._requests = protocol

    @property
    def offers_upgrade(self) -> bool:
        """Whether the head just read will be read again, without its offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Parses the data, with the errors of httptools."""
        rest = memoryview(data)
        while rest:
            try:
                super().feed_data(rest)
                break
            except HttpParserUpgrade as upgrade:
                if not self.offers_upgrade:
                    raise
                rest = rest[upgrade.args[0] :]
                super().feed_data(b"".join(self._head()))

    def _head(self) -> Iterable[bytes]:
        version = self.get_http_version().encode()
        yield b"%b %b HTTP/%b\r\n" % (self.get_method(), self._requests.url, version)
        for name, value in self._requests.headers:
            if name != b"upgrade":
                yield b"%b: %b\r\n" % (name, value)
        yield b"\r\n"
