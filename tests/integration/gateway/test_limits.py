"""Limits on heads, bodies and connections, and which web pages may call the gateway."""

import asyncio
import gzip
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from pagewire.gateway.answers.paced_json import PacedJson
from pagewire.gateway.http.protocol import HEAD_BYTES, HttpProtocol
from support.processes.certificates import Authority
from support.processes.gateway_process import GatewayProcess, gateway
from support.waiting import until

ORIGIN = "https://page.example"
START = b"GET /healthz HTTP/1.1\r\nhost: x"


@pytest.fixture(scope="module")
def served() -> Iterator[GatewayProcess]:
    with gateway("127.0.0.1:1", cors_origins=f"https://other.example, {ORIGIN}") as process:
        yield process


def exchange(process: GatewayProcess, data: bytes) -> tuple[int, dict[str, object]]:
    """Sends raw bytes; the status and the body of the answer, after which the connection ends."""
    with socket.create_connection(process.address, timeout=20) as connection:
        connection.sendall(data)
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["complete", "incomplete"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\na: " + b"y" * HEAD_BYTES,
        b"GET /healthz HTTP/1.1\r\nhost: x"
        + b"".join(b"\r\na%d: y" % i for i in range(HEAD_BYTES)),
        b"GET /" + b"y" * HEAD_BYTES + b" HTTP/1.1\r\nhost: x",
    ],
    ids=["one header", "many headers", "target"],
)
def test_large_heads_are_refused(served: GatewayProcess, head: bytes, end: bytes) -> None:
    status, body = exchange(served, head + end)
    assert status == 431
    assert body["error"]["code"] == "headers_too_large"


def test_heads_below_the_limit_are_accepted(served: GatewayProcess) -> None:
    headers = {"a": "y" * (HEAD_BYTES - 1000)}
    with httpx.Client(base_url=served.url) as client:
        for _ in range(3):  # on one connection, where each head is counted separately
            assert client.get("/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
def test_data_that_is_not_http_gets_an_error_body(served: GatewayProcess, data: bytes) -> None:
    status, body = exchange(served, data)
    assert status == 400
    assert body["error"]["code"] == "invalid_http"


async def test_slow_heads_and_silent_connections_are_closed() -> None:
    class ShortTimeouts(HttpProtocol):
        head_seconds = 0.2

    assert await _open_for(ShortTimeouts, b"") < 2
    assert await _open_for(ShortTimeouts, b"GET / HTTP/1.1\r\nhost:") < 2


async def _open_for(protocol: type[HttpProtocol], data: bytes) -> float:
    """Seconds until a server closes a connection after receiving `data`."""

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("no request was complete")

    async with _served(protocol, app) as address:
        reader, writer = await asyncio.open_connection(*address)
        began = time.monotonic()
        writer.write(data)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
    return time.monotonic() - began


@asynccontextmanager
async def _served(
    protocol: type[HttpProtocol], app: Any, keep_alive: float = 5, **tls: Any
) -> AsyncIterator[tuple[str, int]]:
    """A server of this application and protocol; its address."""
    config = Config(app, ws="none", lifespan="off", interface="asgi3", log_config=None)
    config.load()
    config.timeout_keep_alive = keep_alive  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: protocol(config, ServerState(), {}, loop), "127.0.0.1", 0, **tls
    )
    async with server:
        yield server.sockets[0].getsockname()


@pytest.mark.parametrize("reads", [False, True])
async def test_an_answer_that_is_not_read_ends(reads: bool) -> None:
    """A slow reader's answer continues, although the kernel accepts no data for some time."""
    size, piece = 24 << 20, 1 << 20
    ended = asyncio.Event()

    class ShortTimeouts(HttpProtocol):
        unread_seconds = 0.5

    async def app(scope: object, receive: Any, send: Any) -> None:
        length = str(size).encode()
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-length", length)]})
        body = {"type": "http.response.body", "body": bytes(piece)}
        for number in range(size // piece):
            await send({**body, "more_body": number < size // piece - 1})
        ended.set()

    async with _served(ShortTimeouts, app) as address:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 19)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 16)
        writer.write(START + b"\r\n\r\n")
        if not reads:
            await asyncio.wait_for(ended.wait(), 10)
            got = 0
            with suppress(ConnectionResetError):
                while data := await reader.read(1 << 20):
                    got += len(data)
            assert got < size
            return
        await reader.readuntil(b"\r\n\r\n")
        began, got = time.monotonic(), 0
        while time.monotonic() - began < 6 * ShortTimeouts.unread_seconds:
            got += len(await reader.readexactly(1 << 16))
            await asyncio.sleep(0.05)
        await reader.readexactly(size - got)
        writer.close()


async def test_a_large_answer_may_be_read_slowly_over_tls(tmp_path: Path) -> None:
    """For longer than the timeouts of idle and of closing connections."""
    size = 24 << 20
    identity = Authority(tmp_path).identity("gateway")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(identity.cert, identity.key)
    client_tls = ssl.create_default_context(cafile=identity.ca)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PacedJson([json.dumps("x" * size).encode()])(scope, receive, send)

    tls = {"ssl": server_tls, "ssl_shutdown_timeout": 0.5}
    async with _served(HttpProtocol, app, 0.5, **tls) as address:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 19)
        reader, writer = await asyncio.open_connection(
            sock=connection, limit=1 << 16, ssl=client_tls, server_hostname="127.0.0.1"
        )
        writer.write(START + b"\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        began, body = time.monotonic(), b""
        while time.monotonic() - began < 3:
            body += await reader.readexactly(1 << 16)
            await asyncio.sleep(0.05)
        body += await reader.readexactly(size + len('""') - len(body))
        assert json.loads(body) == "x" * size
        writer.close()


def test_the_bytes_of_all_bodies_are_bounded() -> None:
    settings = {"max_body_bytes": 150_000, "max_open_body_bytes": 200_000}
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 140000\r\n\r\n"
    )
    with gateway("127.0.0.1:1", **settings) as process:

        def begin() -> socket.socket:
            connection = socket.create_connection(process.address, timeout=0.5)
            connection.sendall(head + bytes(120_000))
            return connection

        def refusal() -> bytes:
            """The answer to another body; empty if the gateway waits for the rest of it."""
            answer = b""
            with begin() as second, suppress(TimeoutError):
                while b"already" not in answer:
                    answer += second.recv(65536)
            return answer

        with begin():
            until(refusal)  # the first body may not have been read before
            answer = refusal()
            assert answer.startswith(b"HTTP/1.1 429 "), answer
            assert b"requests being answered have bodies of" in answer
            small = httpx.post(f"{process.url}/v1/completions", json={"prompt": "x"})
            assert small.status_code == 503, "a small body fits; there is no scheduler"

        def post_large() -> int:
            body = {"prompt": "x" * 140_000}
            return httpx.post(f"{process.url}/v1/completions", json=body).status_code

        until(lambda: post_large() == 503)  # a large body fits again; there is no scheduler


def test_a_body_that_is_announced_as_too_large_is_not_asked_for(served: GatewayProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    status, body = exchange(
        served, head + b"expect: 100-continue\r\ncontent-length: 999999999\r\n\r\n"
    )
    assert status == 413
    assert body["error"]["code"] == "request_too_large"  # type: ignore[index]


def test_compressed_bodies_are_refused_by_name(served: GatewayProcess) -> None:
    answer = httpx.post(
        f"{served.url}/v1/completions",
        content=gzip.compress(b'{"prompt": "x"}'),
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the content encoding is 'gzip'; send ")


def test_a_body_may_be_larger_than_a_head(served: GatewayProcess) -> None:
    assert HIGH_WATER_LIMIT <= HEAD_BYTES
    body = {"prompt": "x" * (4 * HEAD_BYTES)}
    answer = httpx.post(f"{served.url}/v1/completions", json=body)
    assert answer.status_code == 503, "there is no scheduler, so the body was read"


async def test_a_head_that_arrives_with_an_earlier_body_is_counted_separately() -> None:
    class SmallHeads(HttpProtocol):
        head_bytes = 200

    async def app(_: object, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 400\r\n\r\n" + b"x" * 400
    async with _served(SmallHeads, app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post + START)
        received = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        writer.write(b"\r\nconnection: close\r\n\r\n")
        received += await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert received.count(b"HTTP/1.1 200 ") == 2, received


def open_requests(soft: int, hard: int, configured: int) -> subprocess.CompletedProcess[str]:
    """A process that prints the bound of open requests under limits of file descriptors: without a
    setting and with one, and then the limits."""
    code = (
        f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); "
        "from pagewire.config import GatewayConfig as C; "
        "from pagewire.gateway.server import max_open_requests as limit; "
        f"print(limit(C()), limit(C(max_open_requests={configured})), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_open_requests_are_bounded_by_file_descriptors() -> None:
    """The soft limit is raised first. A configured number is used as it is."""
    assert open_requests(200, 1000, configured=5000).stdout.strip() == "872 5000 (1000, 1000)"


def test_pages_of_configured_origins_may_call(served: GatewayProcess) -> None:
    asked = {"access-control-request-method": "POST", "origin": ORIGIN}
    allowed = httpx.options(f"{served.url}/v1/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    other = httpx.get(f"{served.url}/healthz", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", [ORIGIN, "https://evil.example"])
def test_pages_may_use_openais_client(served: GatewayProcess, origin: str) -> None:
    """It has many headers, and other clients have other ones."""
    headers = "authorization, content-type, x-stainless-arch, x-stainless-os, x-stainless-runtime"
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }
    answer = httpx.options(f"{served.url}/v1/chat/completions", headers=asked)
    if origin == ORIGIN:
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == headers
    else:
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_can_read_the_headers_of_a_refusal() -> None:
    with gateway("127.0.0.1:1", cors_origins=ORIGIN, max_open_requests=1) as process:
        asyncio.run(_refused_page(process))


async def _refused_page(process: GatewayProcess) -> None:
    _, writer = await asyncio.open_connection(*process.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 9\r\n\r\n"
    )
    async with httpx.AsyncClient(base_url=process.url, headers={"origin": ORIGIN}) as http:
        async with asyncio.timeout(10):  # until the first one has been read
            while True:
                refused = await http.post("/v1/completions", json={"prompt": "x"})
                if refused.status_code == 429:
                    break
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    exposed = refused.headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "x-request-id", "request-id"} <= {*exposed}
    writer.close()


def test_no_page_may_call_by_default() -> None:
    asked = {"access-control-request-method": "POST", "origin": ORIGIN}
    with gateway("127.0.0.1:1") as process:
        refused = httpx.options(f"{process.url}/v1/completions", headers=asked)
        plain = httpx.get(f"{process.url}/healthz", headers={"origin": ORIGIN})
    assert refused.status_code == 405
    for answer in (refused, plain):
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the body that it receives."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    length = str(len(body)).encode()
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("pieces", [1, 7, 1000], ids="{} bytes a read".format)
async def test_an_offer_of_another_protocol_is_ignored(pieces: int) -> None:
    """Java's HTTP client offers HTTP/2 with every request; its bodies once arrived as empty."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAM\r\n"
    post = b"POST /x HTTP/1.1\r\nhost: x\r\n"
    requests = (
        post + offer + b"content-length: 3\r\n\r\none"
        b"GET /y HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        + post + offer + b"transfer-encoding: chunked\r\n\r\n5\r\nthree\r\n0\r\n\r\n"
        + post + b"content-length: 4\r\n\r\nfour"
    )  # fmt: skip
    async with _served(HttpProtocol, _echo) as address:
        reader, writer = await asyncio.open_connection(*address)
        for start in range(0, len(requests), pieces):
            writer.write(requests[start : start + pieces])
            await writer.drain()
            await asyncio.sleep(0)
        for body in (b"one", b"", b"three", b"four"):
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: %d\r\n" % len(body) in answer
            assert await asyncio.wait_for(reader.readexactly(len(body)), 10) == body
        writer.close()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_old_clients_get_no_chunks(method: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one, ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async with _served(HttpProtocol, app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(method + b" / HTTP/1.0\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert body == (b"one, two" if method == b"GET" else b"")


async def test_bodies_that_arrive_together_are_kept_apart() -> None:
    head = b"POST / HTTP/1.1\r\nhost: pagewire\r\n"
    bodies = [b"one", b"", b"three" * 20_000]
    requests = b"".join(
        head
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\n\r\n"
        for body in bodies
    )
    async with _served(HttpProtocol, _echo) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(requests)
        for body in bodies:
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert b"content-length: %d\r\n" % len(body) in answer
            assert await asyncio.wait_for(reader.readexactly(len(body)), 10) == body
        writer.close()


async def test_a_body_of_tiny_chunks_leaves_turns_to_others() -> None:
    """Each chunk is a call, however small it is."""
    chunks, size = 0, 1 << 18
    most_in_a_turn = 0

    class Counted(HttpProtocol):
        def on_body(self, body: bytes) -> None:
            nonlocal chunks
            chunks += 1
            super().on_body(body)

    async def count_turns() -> None:
        nonlocal chunks, most_in_a_turn
        while True:
            chunks = 0
            await asyncio.sleep(0)
            most_in_a_turn = max(most_in_a_turn, chunks)

    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = head + b"1\r\nx\r\n" * size + b"0\r\n\r\n"
    async with _served(Counted, _echo) as address:
        turns = asyncio.create_task(count_turns())
        reader, writer = await asyncio.open_connection(*address)
        for request in (sent, sent):  # the second shows that the connection is read again
            writer.write(request)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert b"content-length: %d\r\n" % size in answer
            assert await asyncio.wait_for(reader.readexactly(size), 30) == b"x" * size
        writer.close()
        turns.cancel()
    assert 1000 < most_in_a_turn <= (32 << 10) // 6 + 1


async def test_a_client_may_leave_while_its_bytes_wait() -> None:
    """The connection is read again, so its end is noticed."""
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with _served(HttpProtocol, app) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(head + b"1\r\nx\r\n" * (1 << 17))
        await writer.drain()
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 10)


def test_a_low_limit_of_descriptors_is_logged_with_the_remedy() -> None:
    done = open_requests(64, 200, configured=5)
    assert done.stdout.strip() == "72 5 (200, 200)"
    assert done.stderr == (
        "the limit of 200 file descriptors allows only 72 open requests; raise it (ulimit -n), or "
        "set --max-open-requests\n"
    )
