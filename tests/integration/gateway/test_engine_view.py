"""The engine's view at the HTTP port: its content, its access, and its end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.processes.gateway_process import GatewayProcess, ready_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler

PATH = "/engine/events"


async def first_event(client: httpx.AsyncClient, **headers: str) -> Any:
    async with client.stream("GET", PATH, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("no event came")


async def test_a_scheduler_without_snapshots_is_shown_by_its_load(http: httpx.AsyncClient) -> None:
    state = await first_event(http)
    [scheduler] = state["schedulers"]
    assert scheduler["state"] == "ready"
    assert scheduler["models"] == ["scripted"]
    assert scheduler["snapshot"] is None
    assert state["gateway"]["viewers"] == 1
    assert state["gateway"]["first_token"] == [0, 0]


async def test_with_keys_it_needs_an_operators(peer: ScriptedScheduler, tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("ada", "olga")}
    lines = [entry_of(name, keys[name], None, RateLimits(), name == "olga") for name in keys]
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(lines))
    async with (
        ready_gateway(await peer.start(), api_keys_file=str(file)) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        for path in ("/", "/page/main.js"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get(PATH)).status_code == 401
        refused = await client.get(PATH, headers={"authorization": f"Bearer {keys['ada']}"})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operator_key_required"
        assert "operator: true" in refused.json()["error"]["message"]
        state = await first_event(client, authorization=f"Bearer {keys['olga']}")
        assert len(state["schedulers"]) == 1


async def test_without_the_page_there_is_no_view(peer: ScriptedScheduler) -> None:
    async with (
        ready_gateway(await peer.start(), page=False) as process,
        httpx.AsyncClient(base_url=process.url) as client,
    ):
        for path in (PATH, "/"):
            assert (await client.get(path)).status_code == 404


async def test_viewers_do_not_delay_a_drain(served: GatewayProcess) -> None:
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=20) as client,
        client.stream("GET", PATH) as answer,
    ):
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        served.process.terminate()
        assert [line async for line in lines if line.startswith("data")] == []
    await asyncio.to_thread(served.process.wait, 15)
