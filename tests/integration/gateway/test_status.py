"""A gateway's reports: health, load, metrics, models, and the same with API keys."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.processes.gateway_process import GatewayProcess, ready_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

READ_PATHS = (
    "/v1/models",
    "/v1/models/scripted",
    "/health",
    "/ping",
    "/healthz",
    "/readyz",
    "/load",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/docs/swagger-ui.css",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_peer() -> AsyncIterator[ScriptedScheduler]:
    peer = ScriptedScheduler()
    yield peer
    await peer.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(shared_peer: ScriptedScheduler) -> AsyncIterator[GatewayProcess]:
    """A gateway that the tests without settings share."""
    async with ready_gateway(await shared_peer.start()) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def peer() -> AsyncIterator[ScriptedScheduler]:
    """A scheduler for a gateway with its own settings."""
    peer = ScriptedScheduler()
    yield peer
    await peer.stop()


async def test_models_as_openai_and_vllm_describe_them(served: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        listed = [model async for model in client.models.list()]
        model = await client.models.retrieve("scripted")
    assert listed == [model]
    assert (model.id, model.object, model.owned_by) == ("scripted", "model", "pagewire")
    more = model.model_dump()
    assert (more["root"], more["parent"], more["max_model_len"]) == ("/models/a", None, 4096)
    [permission] = more["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert permission["allow_fine_tuning"] is False


async def test_health_follows_the_schedulers(
    http: httpx.AsyncClient, shared_peer: ScriptedScheduler
) -> None:
    for path in ("/health", "/ping"):
        answer = await http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.post("/ping")).status_code == 200
    shared_peer.ready_workers = 0

    async def unhealthy() -> bool:
        return (await http.get("/health")).status_code == 503

    while not await unhealthy():
        await asyncio.sleep(0.01)
    answer = await http.get("/ping")
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (503, b"", "1")
    shared_peer.ready_workers = 1
    while await unhealthy():
        await asyncio.sleep(0.01)


async def test_load_counts_requests_that_generate(
    http: httpx.AsyncClient, shared_peer: ScriptedScheduler
) -> None:
    assert (await http.get("/load")).json() == {"server_load": 0}
    shared_peer.step = 0.05
    body = {"prompt": "x", "max_tokens": 8}
    running = asyncio.create_task(http.post("/v1/completions", json=body))
    await eventually(lambda: shared_peer.running == 1)
    assert (await http.get("/load")).json() == {"server_load": 1}
    await running
    shared_peer.step = 0.001
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_metrics_and_version(http: httpx.AsyncClient, served: GatewayProcess) -> None:
    assert (await http.get("/version")).json() == {"version": version("pagewire")}
    plain = await http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert "pagewire_gateway_open_requests 1.0" in plain.text
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    openmetrics = await http.get("/metrics", headers=accept)
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    assert served.metric("open_requests") == 0


async def test_head_is_get_without_the_body(http: httpx.AsyncClient) -> None:
    for path in READ_PATHS:
        got, head = await http.get(path), await http.head(path)
        assert got.status_code == head.status_code == 200, path
        assert head.content == b""
        assert head.headers.get("content-type") == got.headers.get("content-type")


async def test_a_method_that_a_route_has_not(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/models")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert (await http.head("/tokenize")).status_code == 405


async def test_tokens_of_a_text(http: httpx.AsyncClient, shared_peer: ScriptedScheduler) -> None:
    found = (await http.post("/tokenize", json={"prompt": "Hi", "model": "scripted"})).json()
    assert found == {"count": 2, "max_model_len": 4096, "tokens": [72, 105], "token_strs": None}
    text = (await http.post("/detokenize", json={"tokens": [72, 105]})).json()
    assert text == {"prompt": "Hi"}
    unknown = await http.post("/tokenize", json={"prompt": "Hi", "model": "gone"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert len(shared_peer.calls) == 2


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(
    tmp_path: Path, peer: ScriptedScheduler
) -> AsyncIterator[tuple[GatewayProcess, str]]:
    """A gateway with an API key of three requests a minute and one prompt at once, and the key."""
    file, key = tmp_path / "keys.yaml", new_key()
    limits = RateLimits(requests_per_minute=3, tokens_per_minute=1000, max_concurrent=1)
    file.write_text(entry_of("ada", key, None, limits))
    settings = {"api_keys_file": str(file), "api_metrics": True}
    async with ready_gateway(await peer.start(), **settings) as process:
        yield process, key


async def test_a_key_is_needed_for_what_tells_of_clients(
    guarded: tuple[GatewayProcess, str],
) -> None:
    process, key = guarded
    shown = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=process.url) as client:
        for path in ("/metrics", "/load", "/version", "/v1/models"):
            assert (await client.get(path)).status_code == 401
            assert (await client.head(path)).status_code == 401
            assert (await client.get(path, headers=shown)).status_code == 200
        for path in ("/health", "/ping", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401


async def test_tokenizing_counts_as_a_request_and_uses_no_tokens(
    guarded: tuple[GatewayProcess, str], peer: ScriptedScheduler
) -> None:
    process, key = guarded
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=process.url, headers=headers) as client:
        peer.step = 0.05
        body = {"prompt": "x", "max_tokens": 8}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: peer.running == 1)
        # The key's only prompt is running: a call that generates nothing does not need its place.
        answer = await client.post("/tokenize", json={"prompt": "x" * 2000})
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 900
        await running
        assert (await client.post("/detokenize", json={"tokens": [65]})).status_code == 200
        spent = await client.post("/tokenize", json={"prompt": "x"})
        assert spent.status_code == 429
        assert json.loads(spent.text)["error"]["code"] == "rate_limit_exceeded"


async def test_metrics_can_be_left_to_their_own_port(peer: ScriptedScheduler) -> None:
    async with (
        ready_gateway(await peer.start(), api_metrics=False, openapi=False) as process,
        httpx.AsyncClient(base_url=process.url) as client,
    ):
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.get("/docs")).status_code == 404
        assert process.metric("open_requests") == 0


async def test_open_calls_are_limited(peer: ScriptedScheduler) -> None:
    peer.call_gate.clear()
    async with (
        ready_gateway(await peer.start(), max_open_requests=1) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        waiting = asyncio.create_task(client.post("/tokenize", json={"prompt": "x"}))
        await eventually(lambda: len(peer.calls) == 1)
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 429
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        peer.call_gate.set()
        assert (await waiting).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
