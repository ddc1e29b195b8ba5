"""Bodies that helper processes parse: the jobs and errors are those of small bodies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser
from pagewire.gateway.parsing.parser_pool import INLINE_BYTES, ParserPool
from support.jobs import requests_of
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler, expected_text

CHAT = "/v1/chat/completions"
MODELS = {"m": ServedModel(4096)}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(ScriptedScheduler()) as client:
        client.timeout = httpx.Timeout(30)
        yield client


async def test_a_large_body_is_answered_like_a_small_one(client: httpx.AsyncClient) -> None:
    text = "word " * (INLINE_BYTES // 5 + 1)
    body = {"prompt": ["a b", text], "max_tokens": 3, "seed": 5, "n": 2, "logprobs": 1}
    answer = await client.post("/v1/completions", json=body)
    wanted = [("a b", 5), ("a b", 6), (text, 5), (text, 6)]
    choices = answer.json()["choices"]
    assert [c["text"] for c in choices] == [expected_text(*each, 3) for each in wanted]
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [3] * 4
    assert answer.json()["usage"]["prompt_tokens"] == 2 + len(text.split())
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_a_deadline_counts_from_the_arrival_of_the_request(client: httpx.AsyncClient) -> None:
    body = chat(deadline_ms=1, user="u" * INLINE_BYTES)
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_helper_processes_make_the_same_jobs_and_errors() -> None:
    parser = ParserPool(BodyLimits(), 1 << 20, processes=1)
    large = {"user": "u" * INLINE_BYTES, "seed": 3, "stop": ["x"], "logit_bias": {"4": 1}}
    try:
        job = await parser.parse("chat", chat(**large, n=2), MODELS, never)
        inline = JobParser(BodyLimits()).parse("chat", chat(**large, n=2), MODELS)
        made, expected = requests_of(job), requests_of(inline)
        for request in [*made, *expected]:
            request.request_id = ""
        assert made == expected
        assert [r.sampling.seed for r in made] == [3, 4]
        assert job.common == inline.common
        with pytest.raises(RequestError) as refused:
            await parser.parse("chat", chat(**large, n=99), MODELS, never)
        assert refused.value == invalid("n", "n is 99; it must be between 1 and 16")
        unknown = await parser.parse("chat", chat(**large, mood=1), MODELS, never)
        assert unknown.ignored == ("mood",)
    finally:
        await parser.close()


async def test_helper_processes_refuse_unknown_fields_as_the_gateway_does() -> None:
    parser = ParserPool(BodyLimits(), 1 << 20, processes=1, strict_fields=True)
    try:
        for padding in ("", "u" * INLINE_BYTES):
            with pytest.raises(RequestError, match="mood is not a known field"):
                await parser.parse("chat", chat(user=padding, mood=1), MODELS, never)
    finally:
        await parser.close()


async def test_helper_processes_tokenize_and_write_large_answers(client: httpx.AsyncClient) -> None:
    text = "0123456789" * (INLINE_BYTES // 5)  # large in both directions
    answer = await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    found = answer.json()
    assert (found["count"], found["tokens"]) == (len(text), list(text.encode()))
    assert found["token_strs"] == list(text)
    assert int(answer.headers["content-length"]) == len(answer.content)
    back = await client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": text}
    wrong = await client.post("/tokenize", json={"prompt": text, "chat_template": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "chat_template")
    misspelt = await client.post("/tokenize", json={"prompt": text, "prmpt": ""})
    assert misspelt.headers["x-pagewire-ignored"] == "prmpt"


async def test_parsing_stops_when_the_client_leaves() -> None:
    parser = ParserPool(BodyLimits(), 1 << 20, processes=1)

    async def disconnects() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    try:
        began = time.monotonic()
        with pytest.raises(ClientGoneError):
            await parser.parse("chat", chat(user="u" * INLINE_BYTES), MODELS, disconnects)
        assert time.monotonic() - began < 0.3, "before a helper has started"
        await parser.parse("chat", chat(user="u" * INLINE_BYTES), MODELS, never)
    finally:
        await parser.close()


async def test_a_body_that_takes_too_long_to_parse_is_an_error() -> None:
    parser = ParserPool(BodyLimits(), 1 << 24, processes=1, timeout=0.001)
    ids = json.dumps({"prompt": [7] * 1_900_000}).encode()
    try:
        with pytest.raises(RequestError, match="it took longer than") as failed:
            await parser.parse("completions", ids, {"m": ServedModel(2_000_000)}, never)
        assert failed.value.code is Code.INTERNAL
    finally:
        await parser.close()
