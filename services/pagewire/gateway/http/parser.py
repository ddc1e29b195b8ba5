"""The parser of a connection's requests, for a server that speaks HTTP/1.1 and nothing else."""

from array import array
from collections.abc import Iterable
from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class _Requests(Protocol):
    """What the parser needs of the protocol that it calls."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(HttpRequestParser):
    """Reads a request that offers another protocol (`Upgrade: h2c`) as one that does not.

    A server may ignore such an offer (RFC 9110, 7.8), and Java's HTTP client makes it with every
    request to a server without TLS. httptools would take the body for data of the other protocol.
    """

    def __init__(self, protocol: _Requests) -> None:
        super().__init__(protocol)
        self._requests = protocol

    @property
    def offers_upgrade(self) -> bool:
        """Whether the head that was just read will be read again, without its offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Parses the data; raises what httptools raises."""
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
