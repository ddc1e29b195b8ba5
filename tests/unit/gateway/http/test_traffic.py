"""The answers to a client whose request the gateway refuses."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from pagewire.gateway.http.traffic import Traffic
from pagewire.gateway.metrics import GatewayMetrics

PATH = "/v1/completions"


async def receive() -> Message:
    return {"type": "http.disconnect"}


async def test_idle_time_does_not_count_for_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("pagewire.gateway.http.traffic.time", clock)
    answered = asyncio.Event()
    sent: list[Message] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await answered.wait()

    async def send(message: Message) -> None:
        sent.append(message)

    traffic = Traffic(GatewayMetrics(), (PATH,), 40, 1 << 20).wrap(answer)
    clock.now = 3600.0
    scopes = [{"type": "http", "path": PATH, "method": "POST"} for _ in range(41)]
    running = [asyncio.create_task(traffic(scope, receive, send)) for scope in scopes[:40]]
    await asyncio.sleep(0)
    clock.now = 3600.5
    await traffic(scopes[40], receive, send)
    assert sent[0]["status"] == 429
    headers = dict(sent[0]["headers"])
    assert int(headers[b"retry-after"]) == 20, "no request was answered in half a second"
    answered.set()
    await asyncio.gather(*running)
