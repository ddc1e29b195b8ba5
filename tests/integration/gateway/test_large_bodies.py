"""Bodies that helper processes parse: the same jobs and errors as of small ones, within bounds."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope, Formatter
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.parsing import JobParser, node_bound
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.logprob_log import CandidateReader, LogprobLog
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.http.paced_json import json_utf8, paced_logprobs
from pagewire.gateway.http.parser_pool import INLINE_BYTES, ParserPool
from pagewire.packing import pack, pack_floats
from pagewire.v1 import inference_pb2 as pb
from support.jobs import requests_of
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler, expected_text

CHAT = "/v1/chat/completions"
MODELS = {"m": 4096}
SMALL = BodyLimits(
    max_json_nodes=600, max_messages=30, max_template_bytes=100, max_template_nodes=9
)


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


async def test_a_deadline_counts_from_the_arrival(client: httpx.AsyncClient) -> None:
    body = chat(deadline_ms=1, user="u" * INLINE_BYTES)
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("body", "named", "remedy"),
    [
        (chat(chat_template_kwargs={"a": [0] * 9}), "chat_template_kwargs", "--max-template-nodes"),
        (chat(chat_template_kwargs={"a": "b" * 100}), "chat_template_kwargs", "--max-template-by"),
        (chat(messages=[{"role": "user", "content": ""}] * 31), "messages", "give 30"),
        (chat(tools=[[]] * 600), "", "--max-json-nodes|--max-messages"),
        (chat(metadata={str(n): "v" for n in range(1025)}), "", "at most 600"),
        (chat(cache_salt="s" * 257), "cache_salt", "256"),
        (chat(**{"k" * 5000: 1}), "k" * 200 + "...", "not a known field"),
    ],
)
def test_bounds(body: bytes, named: str, remedy: str) -> None:
    with pytest.raises(RequestError) as refused:
        JobParser(SMALL).parse("chat", body, MODELS)
    assert refused.value.field == named
    assert any(part in refused.value.message for part in remedy.split("|")) or len(named) > 99


def test_token_ids_beyond_the_models_length_are_refused() -> None:
    body = json.dumps({"prompt": [[1], [7] * 4096]}).encode()
    with pytest.raises(RequestError, match="prompt 1 has 4096 tokens"):
        JobParser(BodyLimits()).parse("completions", body, MODELS)


@given(
    st.recursive(
        st.none() | st.integers() | st.text('[{,"\\x'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('[{,"\\'), inner),
    )
)
def test_no_value_escapes_the_count(value: Any) -> None:
    def count(value: Any) -> int:
        items = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(count, items)) if isinstance(value, dict | list) else 1

    nodes = count({"tools": value})
    body = json.dumps({"tools": value}).encode()
    assert node_bound(body) >= nodes
    limits = BodyLimits(max_json_nodes=nodes - 1)
    with pytest.raises(RequestError, match=f"at most {nodes - 1} are allowed"):
        JobParser(limits).parse("completions", body, MODELS)


async def test_helpers_make_the_same_jobs_and_errors() -> None:
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
    finally:
        await parser.close()


async def test_a_client_that_leaves_is_not_parsed_for() -> None:
    parser = ParserPool(BodyLimits(), 1 << 20, processes=1)

    async def hangs_up() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    try:
        began = time.monotonic()
        with pytest.raises(ClientGoneError):
            await parser.parse("chat", chat(user="u" * INLINE_BYTES), MODELS, hangs_up)
        assert time.monotonic() - began < 0.3, "before a helper has started"
        await parser.parse("chat", chat(user="u" * INLINE_BYTES), MODELS, never)
    finally:
        await parser.close()


async def test_what_takes_a_helper_too_long_fails_alone() -> None:
    parser = ParserPool(BodyLimits(), 1 << 24, processes=1, timeout=0.001)
    ids = json.dumps({"prompt": [7] * 1_900_000}).encode()
    try:
        with pytest.raises(RequestError, match="it took longer than") as failed:
            await parser.parse("completions", ids, {"m": 2_000_000}, never)
        assert failed.value.code is Code.INTERNAL
    finally:
        await parser.close()


@pytest.mark.parametrize(
    "formatter",
    [
        CompletionFormatter(Envelope("cmpl", "text_completion", "m")),
        ChatFormatter(Envelope("chatcmpl", "chat.completion", "m")),
    ],
)
async def test_log_probabilities_in_turns_are_those_in_one(formatter: Formatter) -> None:
    logs = LogprobLog(), LogprobLog()
    for number in range(75):
        message = pb.MultiplexResponse(
            candidate_ids=pack([number, 1, 2]),
            candidate_logprobs=pack_floats([-0.5, -1.0, -number]),  # type: ignore[arg-type]
            candidate_sizes=[2, 1, 1],
            candidate_bytes="\xe9xy".encode(),
        )
        for log in logs:
            log.extend(CandidateReader(message).take(1, 3))
    pieces = await paced_logprobs(formatter, logs[0], Pacer())
    assert "".join(pieces) == json_utf8(formatter.logprobs(logs[1].take()))
    assert logs[0].waiting == 0
