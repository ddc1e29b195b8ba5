"""The charges of keys for any mix of requests, over real connections."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pagewire.addresses import parse_addresses
from pagewire.auth.accounts import Account
from pagewire.auth.keys import ApiKey, KeyRing, new_key, read_keys
from pagewire.auth.rate_limits import RateLimits
from pagewire.errors import Code, RequestError
from pagewire.gateway.auth.access import AccessControl
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.http.protocol import HttpProtocol
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually

LIMIT = 10**9
MAX_BODY = 4000


def key_of(name: str, key: str, limits: RateLimits) -> ApiKey:
    ring = read_keys(None, f"{name}={key}")
    assert ring is not None
    found = ring.find(key.encode())
    assert found is not None
    return ApiKey(name, found.digest, name, limits)


@dataclass
class GatewayWithAccounts:
    """A gateway in this process at a real port. Its clock stands still, so no bucket fills."""

    peer: ScriptedScheduler
    gateway: Gateway
    address: tuple[str, int]
    keys: dict[str, str]
    ring: list[ApiKey]
    heads: dict[str, int] = field(default_factory=dict)  # sent, by the key's name

    def account(self, name: str) -> Account:
        account = self.gateway.access._callers.find(self.keys[name].encode())
        assert account is not None
        return account

    async def post(
        self, name: str, body: bytes, path: str = "/v1/completions", cut: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request, or its head and `cut` bytes of its body."""
        reader, writer = await asyncio.open_connection(*self.address)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.keys[name]}\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.heads[name] = self.heads.get(name, 0) + 1
        writer.write(head.encode() + body[:cut])
        return reader, writer

    def used(self, name: str) -> int:
        """Tokens as the scheduler counts them: each prompt once, and all outputs."""
        mine = [
            r for r in self.peer.submitted if r.tenant == name and r.request_id in self.peer.used
        ]
        total = 0
        for _, candidates in groupby(mine, key=lambda r: (r.request_id[:40], r.prompt)):
            usages = [self.peer.used[request.request_id] for request in candidates]
            total += usages[0].prompt_tokens + sum(u.completion_tokens for u in usages)
        return total

    async def settled(self) -> None:
        """Waits until nothing runs and all usage was reported."""
        accounts = [self.account(name) for name in self.keys]
        await eventually(lambda: self.peer.running == 0)
        await eventually(lambda: all(a.open == a.running == 0 for a in accounts))
        await eventually(lambda: all(link.idle for link in self.gateway.schedulers.links.values()))


@asynccontextmanager
async def opened(**limits: RateLimits) -> AsyncIterator[GatewayWithAccounts]:
    peer = ScriptedScheduler(step=0.002)
    metrics = GatewayMetrics()
    schedulers = Schedulers(parse_addresses(await peer.start()), metrics)
    await schedulers.start()
    await eventually(lambda: schedulers.ready)
    keys = {name: new_key() for name in limits}
    ring = [key_of(name, keys[name], limits[name]) for name in limits]
    access = AccessControl(lambda: KeyRing(ring), lambda: 0.0)
    gateway = Gateway(schedulers, metrics, MAX_BODY, 1000, access=access)
    config = uvicorn.Config(
        create_app(gateway), ws="none", lifespan="off", interface="asgi3", log_config=None
    )
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: HttpProtocol(config, ServerState(), {}, loop), "127.0.0.1", 0
    )
    try:
        async with server:
            yield GatewayWithAccounts(peer, gateway, server.sockets[0].getsockname(), keys, ring)
    finally:
        await schedulers.close()
        await peer.stop()


def body_of(rng: random.Random) -> dict[str, Any]:
    # Words of three letters and a space: the estimate of a prompt is its number of words.
    words = ["abc"] * rng.randint(1, 30)
    if rng.random() < 0.2:  # fails in the queue, or after some tokens
        words += [f"fail={rng.choice((4, 8, 13))}"]
        words += [f"fail_at={rng.randint(1, 9)}"] if rng.random() < 0.6 else []
    prompt: Any = " ".join(words)
    if rng.random() < 0.2:
        prompt = [f"{prompt} {number:03}" for number in range(rng.randint(1, 3))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.3:
        body["n"] = rng.randint(1, 3)
    if rng.random() < 0.2:
        body["best_of"] = body.get("n", 1) + rng.randint(0, 2)
    elif rng.random() < 0.6:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def invalid_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body that is refused with 400, 404 or 413."""
    kind = rng.randrange(4)
    if kind == 0:
        return json.dumps(body).encode()[:-1]
    if kind == 1:
        body["temperature"] = 9
    elif kind == 2:
        body["model"] = "none"
    else:
        body["user"] = "x" * MAX_BODY
    return json.dumps(body).encode()


async def send_one(
    server: GatewayWithAccounts, rng: random.Random, name: str, reported: list[int]
) -> None:
    """Sends a request whose client may leave early; adds the usage of its answer to `reported`."""
    body = json.dumps(body_of(rng)).encode()
    kind = rng.random()
    if kind < 0.15:
        body = invalid_body(rng, json.loads(body))
    cut = rng.randrange(len(body)) if 0.15 <= kind < 0.25 else None
    reader, writer = await server.post(name, body, cut=cut)
    try:
        if cut is not None:
            await asyncio.sleep(rng.choice((0, 0.01)))
        elif kind < 0.35:  # the client leaves before the answer
            await asyncio.sleep(rng.choice((0, 0.001, 0.003, 0.01)))
        elif kind < 0.55:  # the client leaves within the answer
            with suppress(ConnectionError):
                await reader.read(rng.choice((1, 300, 2000)))
        else:
            answer = await reader.read()
            status = int(answer.split()[1])
            assert status in (200, 400, 404, 413, 429, 500, 504), answer
            reported += [
                int(re.match(rb"\d+", text)[0])
                for text in answer.split(b'"total_tokens":')[1:]
                if text[:1].isdigit()
            ]
    finally:
        writer.close()


@pytest.mark.parametrize("seed", range(4))
async def test_keys_are_charged_for_what_they_used(seed: int) -> None:
    """Keys are removed and added meanwhile; the limits of one key refuse most of its requests."""
    rng = random.Random(seed)
    rich = RateLimits(LIMIT, LIMIT)
    async with opened(ada=rich, bob=RateLimits(LIMIT, 2000, 4)) as server:
        reported: list[int] = []

        async def client(lane: int) -> None:
            lane_rng = random.Random(f"{seed} {lane}")
            for _ in range(30):
                await send_one(server, lane_rng, lane_rng.choice(("ada", "bob")), reported)

        async def reloads() -> None:
            for _ in range(20):
                await asyncio.sleep(0.02)
                gone = server.ring.pop(rng.randrange(len(server.ring)))
                server.gateway.access.reload()
                server.ring.append(gone)
                server.gateway.access.reload()

        await asyncio.gather(reloads(), *(client(lane) for lane in range(6)))
        await server.settled()
        ada, bob = server.account("ada"), server.account("bob")
        await eventually(lambda: ada.charged == server.used("ada"))
        await eventually(lambda: bob.charged == server.used("bob"))
        assert sum(reported) <= ada.charged + bob.charged
        assert sum(reported) > 0
        for account in (ada, bob):
            assert account.tokens is not None
            assert account.tokens.level(0.0) == account.tokens.per_minute - account.charged
        assert ada.requests is not None
        assert LIMIT - ada.requests.level(0.0) == server.heads["ada"], "each head counts"
        assert bob.requests is not None
        assert bob.charged > 0


async def test_requests_that_a_drain_ends_are_charged() -> None:
    rich = RateLimits(LIMIT, LIMIT)
    async with opened(ada=rich) as server:
        body = {"prompt": "abc abc abc", "max_tokens": 3000, "n": 2}
        connections = [
            await server.post("ada", json.dumps(body | {"stream": stream}).encode())
            for stream in (True, False)
        ]
        readers = [reader for reader, _ in connections]
        await eventually(lambda: server.peer.running == 4)
        await readers[0].readuntil(b"data: ")
        ada = server.account("ada")
        assert ada.charged == 2 * (11 // 4 + 2 * 3000)
        failure = RequestError(Code.UNAVAILABLE, "the gateway is shutting down")
        server.gateway.schedulers.fail_all(failure)
        for reader in readers:
            assert b"shutting down" in await reader.read()
        for _, writer in connections:
            writer.close()
        await server.settled()
        await eventually(lambda: ada.charged == server.used("ada"))
        assert ada.charged > 0


async def test_a_request_that_resumes_is_charged_once() -> None:
    """A scheduler is lost twice. A client that leaves meanwhile pays for the tokens it received."""
    async with opened(ada=RateLimits(LIMIT, LIMIT), bob=RateLimits(LIMIT, LIMIT)) as server:
        link = next(iter(server.gateway.schedulers.links.values()))
        body = {"prompt": "abc " * 40, "max_tokens": 200, "n": 2, "stream": True}
        body["stream_options"] = {"include_usage": True}
        stays, writer = await server.post("ada", json.dumps(body).encode())
        leaves, leaver = await server.post("bob", json.dumps(body).encode())
        begun = await stays.readuntil(b" w")
        await leaves.readuntil(b" w")
        for _ in range(2):
            await server.peer.stop()
            await eventually(lambda: not link.connected)
            leaver.close()
            await eventually(lambda: server.account("bob").open == 0)
            await server.peer.start(link.target)
            await eventually(lambda: server.peer.running == 2)
        answer = begun + await stays.read()
        writer.close()
        await server.settled()
        assert server.account("ada").charged == 40 + 2 * 200
        assert b'"total_tokens":440' in answer
        assert 40 < server.account("bob").charged < 40 + 2 * 200
