"""Errors and API keys of /v1/messages, with a gateway process in front of a scripted scheduler."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.clients.named_streams import events_of
from support.processes.gateway_process import GatewayProcess, ready_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually

PATH = "/v1/messages"


def body(text: str = "a b", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def guarded(
    tmp_path: Path, peer: ScriptedScheduler
) -> AsyncIterator[tuple[GatewayProcess, str]]:
    """A gateway with an API key of two requests a minute, and the key."""
    file, key = tmp_path / "keys.yaml", new_key()
    file.write_text(entry_of("ada", key, None, RateLimits(requests_per_minute=2)))
    async with ready_gateway(await peer.start(), api_keys_file=str(file)) as process:
        yield process, key


async def test_a_key_in_its_own_header(guarded: tuple[GatewayProcess, str]) -> None:
    process, key = guarded
    wrong = anthropic.AsyncAnthropic(base_url=process.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await wrong.messages.create(model="scripted", **body())
    found: Any = refused.value.body
    assert (found["type"], found["error"]["type"]) == ("error", "authentication_error")
    client = anthropic.AsyncAnthropic(base_url=process.url, api_key=key, max_retries=0)
    assert (await client.messages.create(model="scripted", **body())).usage.output_tokens == 5
    assert await client.messages.count_tokens(model="scripted", messages=body()["messages"])
    with pytest.raises(anthropic.RateLimitError) as spent:
        await client.messages.create(model="scripted", **body())
    found = spent.value.body
    assert found["error"]["type"] == "rate_limit_error"
    assert int(spent.value.response.headers["retry-after"]) >= 1
    async with httpx.AsyncClient(base_url=process.url) as http:
        keys = [("x-api-key", key), ("x-api-key", key)]
        assert (await http.get("/v1/models", headers=keys)).status_code == 401
        both = {"x-api-key": key, "authorization": "Bearer wrong"}
        assert (await http.get("/v1/models", headers=both)).status_code == 401
        missing = await http.post(PATH, json=body())
        assert missing.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("given", [None, "mine"])
async def test_an_error_names_its_request(
    guarded: tuple[GatewayProcess, str], given: str | None
) -> None:
    """In its body as in the header, wherever the request fails."""
    process, key = guarded
    headers = {} if given is None else {"x-request-id": given}
    allowed = {**headers, "x-api-key": key}
    async with httpx.AsyncClient(base_url=process.url, timeout=30) as client:
        failures = [
            await client.post(PATH, json=body(), headers=headers),
            await client.get(PATH, headers=allowed),
            await client.post(PATH, json=body(stop_sequences=[""]), headers=allowed),
            await client.post(PATH, json=body("fail=13"), headers=allowed),
            await client.post(PATH, json=body(), headers=allowed),
        ]
    assert [answer.status_code for answer in failures] == [401, 405, 400, 500, 429]
    for answer in failures:
        assert answer.json()["request_id"] == answer.headers["request-id"]
        assert given in (None, answer.json()["request_id"])


async def test_an_error_in_a_stream_names_its_request(http: httpx.AsyncClient) -> None:
    failing = body("fail=13 fail_at=3", stream=True)
    for given in ({}, {"request_id": "mine"}):
        answer = await http.post(PATH, json={**failing, **given})
        (event,) = [line for line in answer.text.splitlines() if '"type":"error"' in line]
        found = json.loads(event.removeprefix("data: "))["request_id"]
        assert found == answer.headers["request-id"]
        assert given.get("request_id", found) == found


async def test_errors_of_schedulers(http: httpx.AsyncClient) -> None:
    for code, status, kind in ((3, 400, "invalid_request_error"), (13, 500, "api_error")):
        answer = await http.post(PATH, json=body(f"fail={code}"))
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


async def test_no_scheduler_is_an_overload(peer: ScriptedScheduler) -> None:
    async with (
        ready_gateway(await peer.start(), resume_timeout=0.2) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        await peer.stop()
        answer = await client.post(PATH, json=body(model="scripted"))
        assert answer.status_code == 529
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert answer.headers["retry-after"] == "1"
        other = await client.post("/v1/responses", json={"input": "x", "model": "scripted"})
        assert other.status_code == 503


async def test_a_stream_that_fails_ends_in_the_form_of_its_api(http: httpx.AsyncClient) -> None:
    words = "fail=13 fail_at=3"
    events = [event async for event in events_of(http, PATH, body(words))]
    assert [event["type"] for event in events[:3]] == [
        "message_start",
        "ping",
        "content_block_start",
    ]
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "scripted failure"}
    response = {"input": words, "max_output_tokens": 5}
    events = [event async for event in events_of(http, "/v1/responses", response)]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "scripted failure"


async def test_an_aborted_answer_does_not_look_complete(http: httpx.AsyncClient) -> None:
    """The APIs of Messages and Responses have no reason for the end of a request by its id."""
    words = "abort_at=3"
    response = {"input": words, "max_output_tokens": 5}
    events = [event async for event in events_of(http, PATH, body(words))]
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["message"] == "the request was aborted"
    events = [event async for event in events_of(http, "/v1/responses", response)]
    assert events[-1]["type"] == "response.failed"
    for path, request in ((PATH, body(words)), ("/v1/responses", response)):
        answer = await http.post(path, json=request)
        assert answer.status_code == 500
        assert "the request was aborted" in answer.text


async def test_clients_that_leave_abort_their_requests(
    http: httpx.AsyncClient, peer: ScriptedScheduler
) -> None:
    peer.step = 0.02
    for path, request in (
        (PATH, body(max_tokens=400)),
        ("/v1/responses", {"input": "x", "max_output_tokens": 400}),
    ):
        aborted = len(peer.aborted)
        async with http.stream("POST", path, json={**request, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if "delta" in line:
                    break
        await eventually(lambda aborted=aborted: len(peer.aborted) > aborted)


async def test_large_bodies_are_parsed_in_helper_processes(served: GatewayProcess) -> None:
    text = "word " * 5000
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
        message = (await client.post(PATH, json=body(text))).json()
        assert (
            message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 5000
        )
        counted = await client.post(
            f"{PATH}/count_tokens", json={"messages": body(text)["messages"]}
        )
        assert counted.json() == {"input_tokens": len(text)}
        request = {"input": text, "max_output_tokens": 3, "instructions": "x" * 20_000}
        answer = (await client.post("/v1/responses", json=request)).json()
        assert answer["usage"]["input_tokens"] == 5000
        assert answer["instructions"] == "x" * 20_000


async def test_unknown_fields_are_named(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=body(mood=1, metadata={"user_id": "u"}))
    assert answer.headers["x-pagewire-ignored"] == "mood"
    answer = await http.post("/v1/responses", json={"input": "x", "mood": 1, "user": "u"})
    assert answer.headers["x-pagewire-ignored"] == "mood"
    assert json.loads(answer.text)["user"] == "u"


async def test_openai_client_sees_its_own_errors(served: GatewayProcess) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="scripted", input="x", store=True)
    assert refused.value.param == "store"
