"""Refused and accepted requests, and the results of their fields."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pagewire.config import GatewayConfig
from pagewire.gateway.http.absent import ABSENT
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LIMIT = 200_000
API_PAGE = Path(__file__).parents[4] / "docs/api.md"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(ScriptedScheduler(), max_body_bytes=LIMIT) as client:
        yield client


def chat(**fields: Any) -> tuple[str, str]:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return CHAT, json.dumps(body)


def complete(**fields: Any) -> tuple[str, str]:
    return COMPLETION, json.dumps({"prompt": "hi", **fields})


def message(**fields: Any) -> tuple[str, str]:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


# The path with the body, the status, and the parameter that the error names.
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": DEEP}


def called(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": arguments}}


def tools(*functions: dict[str, Any], **fields: Any) -> tuple[str, str]:
    return chat(tools=[{"type": "function", "function": each} for each in functions], **fields)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: list[tuple[tuple[str, str | bytes], int, str | None]] = [
    # not JSON, or not an object
    ((CHAT, ""), 400, None),
    ((CHAT, "{"), 400, None),
    ((CHAT, "[]"), 400, None),
    ((CHAT, "null"), 400, None),
    ((CHAT, '"text"'), 400, None),
    ((CHAT, b'{"messages": "\xff\xfe"}'), 400, None),
    ((COMPLETION, b'\xef\xbb\xbf{"prompt": "x"}'), 400, None),
    ((COMPLETION, '{"prompt": "\\ud800"}'), 400, None),
    ((COMPLETION, '{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}"), 400, None),
    ((COMPLETION, '{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}"), 400, None),
    (
        (COMPLETION, '{"prompt": "x", "unknown": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}"),
        400,
        None,
    ),
    ((COMPLETION, json.dumps({"prompt": "x" * (LIMIT + 1)})), 413, None),
    (
        chat(messages=[{"role": "user", "content": "x"}] * (GatewayConfig.max_messages + 1)),
        400,
        "messages",
    ),
    # the model
    (complete(model="gpt-5"), 404, "model"),
    (chat(model=""), 404, "model"),
    (chat(model=7), 400, "model"),
    # prompts
    ((COMPLETION, "{}"), 400, "prompt"),
    (complete(prompt=None), 400, "prompt"),
    (complete(prompt=[]), 400, "prompt"),
    (complete(prompt=[[]]), 400, "prompt"),
    (complete(prompt=[[1], []]), 400, "prompt"),
    (complete(prompt=5), 400, "prompt"),
    (complete(prompt={"text": "a"}), 400, "prompt"),
    (complete(prompt=[1, "a"]), 400, "prompt[1]"),
    (complete(prompt=["a", 1]), 400, "prompt[1]"),
    (complete(prompt=[1, True]), 400, "prompt[1]"),
    (complete(prompt=[1.5]), 400, "prompt[0]"),
    (complete(prompt=[-1]), 400, "prompt[0]"),
    (complete(prompt=[2**31]), 400, "prompt[0]"),
    (complete(prompt=[[1], [2, None]]), 400, "prompt[1][1]"),
    (complete(prompt=["a"] * 1025), 400, "prompt"),
    (complete(messages=[]), 400, "messages"),
    # messages
    ((CHAT, "{}"), 400, "messages"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="hi"), 400, "messages"),
    (chat(messages=["hi"]), 400, "messages[0]"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[{"content": "hi"}]), 400, "messages[0].role"),
    (message(role="robot"), 400, "messages[0].role"),
    (message(role="function"), 400, "messages[0].role"),
    (message(tool_call_id="1"), 400, "messages[0].tool_call_id"),
    (message(reasoning="because"), 400, "messages[0].reasoning"),
    (message(tool_calls=[CALL]), 400, "messages[0].tool_calls"),
    (message(role="system", content=None), 400, "messages[0].content"),
    (
        message(role="assistant", tool_calls=[{"id": "1"}]),
        400,
        "messages[0].tool_calls[0].function",
    ),
    (
        message(role="assistant", tool_calls=[{"id": "1", "type": "custom", "custom": {}}]),
        400,
        "messages[0].tool_calls[0].type",
    ),
    (
        message(role="assistant", tool_calls=[called("{")]),
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        message(role="assistant", tool_calls=[called("[1]")]),
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        message(role="assistant", tool_calls=[called('{"a":' * 50 + "1" + "}" * 50)]),
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        message(role="assistant", tool_calls=[called('{"a":' * 5_000)]),
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
    (message(content=None), 400, "messages[0].content"),
    (message(content=5), 400, "messages[0].content"),
    (message(content=["a"]), 400, "messages[0].content[0]"),
    (message(content=[{"text": "a"}]), 400, "messages[0].content[0].type"),
    (message(content=[{"type": "text"}]), 400, "messages[0].content[0].text"),
    (message(content=[{"type": "text", "text": 1}]), 400, "messages[0].content[0].text"),
    (
        message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[0].content[0].type",
    ),
    (
        message(content=[{"type": "input_audio", "input_audio": {}}]),
        400,
        "messages[0].content[0].type",
    ),
    (message(content=[{"type": "smell"}]), 400, "messages[0].content[0].type"),
    (message(name=1), 400, "messages[0].name"),
    (chat(prompt="hi"), 400, "prompt"),
    # sampling
    ((COMPLETION, '{"prompt": "x", "temperature": NaN}'), 400, "temperature"),
    ((COMPLETION, '{"prompt": "x", "temperature": Infinity}'), 400, "temperature"),
    ((COMPLETION, '{"prompt": "x", "temperature": 1e999}'), 400, "temperature"),
    (complete(temperature="1"), 400, "temperature"),
    (complete(temperature=True), 400, "temperature"),
    (complete(temperature=-0.1), 400, "temperature"),
    (complete(temperature=2.1), 400, "temperature"),
    (complete(top_p=0), 400, "top_p"),
    (complete(top_p=1.5), 400, "top_p"),
    (complete(min_p=-1), 400, "min_p"),
    (complete(top_k=-2), 400, "top_k"),
    (complete(top_k=1.0), 400, "top_k"),
    (complete(top_k=2**31), 400, "top_k"),
    (complete(seed=2**63), 400, "seed"),
    (complete(seed="1"), 400, "seed"),
    (complete(presence_penalty=2.1), 400, "presence_penalty"),
    (complete(presence_penalty="1"), 400, "presence_penalty"),
    (complete(frequency_penalty=-2.1), 400, "frequency_penalty"),
    ((COMPLETION, '{"prompt": "x", "frequency_penalty": NaN}'), 400, "frequency_penalty"),
    (complete(repetition_penalty=0), 400, "repetition_penalty"),
    (complete(repetition_penalty=2.1), 400, "repetition_penalty"),
    (complete(logit_bias=[1]), 400, "logit_bias"),
    (complete(logit_bias={"1": 101}), 400, "logit_bias.1"),
    (complete(logit_bias={"1": "5"}), 400, "logit_bias.1"),
    (complete(logit_bias={"1": True}), 400, "logit_bias.1"),
    ((COMPLETION, '{"prompt": "x", "logit_bias": {"1": Infinity}}'), 400, "logit_bias.1"),
    (complete(logit_bias={"a": 1}), 400, "logit_bias"),
    (complete(logit_bias={"-1": 1}), 400, "logit_bias"),
    (complete(logit_bias={"01": 1}), 400, "logit_bias"),
    (complete(logit_bias={"9" * 5000: 1}), 400, "logit_bias"),
    (complete(logit_bias={str(2**31): 1}), 400, "logit_bias"),
    (complete(logit_bias=dict.fromkeys(map(str, range(301)), 1)), 400, "logit_bias"),
    # stop conditions
    (complete(max_tokens=0), 400, "max_tokens"),
    (complete(max_tokens=-1), 400, "max_tokens"),
    (complete(max_tokens="5"), 400, "max_tokens"),
    (complete(max_tokens=5.5), 400, "max_tokens"),
    (complete(max_tokens=True), 400, "max_tokens"),
    (complete(max_tokens=10**30), 400, "max_tokens"),
    (complete(max_completion_tokens=5), 400, "max_completion_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens"),
    (chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    (complete(min_tokens=-1), 400, "min_tokens"),
    (complete(min_tokens=17), 400, "min_tokens"),
    (complete(stop=""), 400, "stop"),
    (complete(stop=["a", ""]), 400, "stop"),
    (complete(stop=["a"] * 17), 400, "stop"),
    (complete(stop="a" * 2000), 400, "stop"),
    (complete(stop=1), 400, "stop"),
    (complete(stop=["a", 1]), 400, "stop[1]"),
    (complete(stop_token_ids=[1] * 9), 400, "stop_token_ids"),
    (complete(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (complete(ignore_eos=1), 400, "ignore_eos"),
    # the rest
    (complete(stream=1), 400, "stream"),
    (complete(stream="true"), 400, "stream"),
    (complete(stream_options={"include_usage": True}), 400, "stream_options"),
    (
        complete(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
    ),
    (complete(priority=2**31), 400, "priority"),
    (complete(cache_salt=""), 400, "cache_salt"),
    (complete(cache_salt=1), 400, "cache_salt"),
    (complete(deadline_ms=0), 400, "deadline_ms"),
    (chat(add_generation_prompt="yes"), 400, "add_generation_prompt"),
    (chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    (chat(chat_template_kwargs=nested(40)), 400, "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": 10**20}), 400, "chat_template_kwargs"),
    (
        (
            CHAT,
            '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": NaN}}',
        ),
        400,
        "chat_template_kwargs",
    ),
    # choices, log probabilities, and fields that are not supported
    (complete(n=0), 400, "n"),
    (complete(n=17), 400, "n"),
    (complete(n=True), 400, "n"),
    (complete(prompt=["a"] * 100, n=16), 400, "n"),
    (complete(best_of=17), 400, "best_of"),
    (complete(best_of=0), 400, "best_of"),
    (complete(best_of=2, n=3), 400, "best_of"),
    (complete(best_of=2, stream=True), 400, "best_of"),
    (complete(prompt=["a"] * 100, best_of=16), 400, "best_of"),
    (chat(best_of=2), 400, "best_of"),
    (complete(logprobs=21), 400, "logprobs"),
    (complete(logprobs=-1), 400, "logprobs"),
    (complete(logprobs=True), 400, "logprobs"),
    (complete(top_logprobs=1), 400, "top_logprobs"),
    (complete(prompt_logprobs=0, stream=True), 400, "prompt_logprobs"),
    (complete(prompt_logprobs=-1), 400, "prompt_logprobs"),
    (complete(echo=True, use_beam_search=True), 400, "echo"),
    (complete(max_tokens=0), 400, "max_tokens"),
    (complete(max_tokens=-1, echo=True), 400, "max_tokens"),
    (chat(prompt_logprobs=21), 400, "prompt_logprobs"),
    (chat(echo=True), 400, "echo"),
    (complete(suffix="x"), 400, "suffix"),
    (complete(guided_regex=""), 400, "guided_regex"),
    (complete(use_beam_search=True, stream=True), 400, "stream"),
    (complete(use_beam_search=1), 400, "use_beam_search"),
    (complete(use_beam_search=True, n=3, best_of=2), 400, "best_of"),
    (complete(use_beam_search=True, best_of=17), 400, "best_of"),
    (complete(length_penalty=2.0), 400, "length_penalty"),
    (complete(early_stopping=True), 400, "early_stopping"),
    (chat(use_beam_search=True), 400, "use_beam_search"),
    (complete(prompt_cache_key=1), 400, "prompt_cache_key"),
    (complete(prompt_cache_key="k" * 1025), 400, "prompt_cache_key"),
    (chat(n=-1), 400, "n"),
    (chat(logprobs=1), 400, "logprobs"),
    (chat(top_logprobs=3), 400, "top_logprobs"),
    (chat(logprobs=False, top_logprobs=3), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), 400, "tools[0].type"),
    (tools({"name": ""}), 400, "tools[0].function.name"),
    (tools({"name": "f g"}), 400, "tools[0].function.name"),
    (tools({"name": "f" * 129}), 400, "tools[0].function.name"),
    (tools({"name": "f"}, {"name": "f"}), 400, "tools[1].function.name"),
    (tools({"name": "f", "parameters": []}), 400, "tools[0].function.parameters"),
    (tools({"name": "f", "description": 1}), 400, "tools[0].function.description"),
    (tools({"name": "f", "parameters": DEEP}), 400, "tools[0].function.parameters"),
    (tools({"name": "f"}, tool_choice=named("g")), 400, "tool_choice"),
    (tools({"name": "f"}, tool_choice="some"), 400, "tool_choice"),
    (tools({"name": "f"}, tool_choice=5), 400, "tool_choice"),
    (tools({"name": "f"}, tool_choice={"type": "function"}), 400, "tool_choice.function"),
    (tools({"name": "f"}, tool_choice={"type": "allowed_tools"}), 400, "tool_choice.type"),
    (tools({"name": "f"}, tool_choice="required", max_tool_calls=0), 400, "max_tool_calls"),
    (tools({"name": "f"}, max_tool_calls=-1), 400, "max_tool_calls"),
    (tools({"name": "f"}, parallel_tool_calls="no"), 400, "parallel_tool_calls"),
    (tools(*[{"name": f"f{i}"} for i in range(513)]), 400, "tools"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(tool_choice=named("f")), 400, "tool_choice"),
    (chat(functions=[{"name": "f"}]), 400, "functions"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (chat(structured_outputs={}), 400, "structured_outputs"),
    (chat(audio={"voice": "x"}), 400, "audio"),
    (chat(modalities=["text", "audio"]), 400, "modalities"),
    (chat(prediction={"type": "text", "content": "x"}), 400, "prediction.type"),
    (chat(prediction={"type": "content"}), 400, "prediction.content"),
    (chat(prediction={"type": "content", "content": 5}), 400, "prediction.content"),
    (chat(prediction="x"), 400, "prediction"),
    (
        chat(prediction={"type": "content", "content": [{"type": "image_url"}]}),
        400,
        "prediction.content[0].type",
    ),
    (
        chat(prediction={"type": "content", "content": [{"type": "text"}]}),
        400,
        "prediction.content[0].text",
    ),
    (chat(store=True), 400, "store"),
    (chat(reasoning_effort="much"), 400, "reasoning_effort"),
    (chat(include_reasoning=1), 400, "include_reasoning"),
    (complete(spaces_between_special_tokens=False), 400, "spaces_between_special_tokens"),
    (complete(skip_special_tokens=0), 400, "skip_special_tokens"),
    (complete(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (complete(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens"),
    (chat(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message"),
    (chat(chat_template="x" * (1 << 16) + "y"), 400, "chat_template"),
    (chat(documents=[1]), 400, "documents[0]"),
    (chat(documents=[{"text": "x" * (1 << 16)}]), 400, "documents"),
    (chat(documents=[{"text": nested(20)}]), 400, "documents"),
    (chat(suffix="x"), 400, "suffix"),
    (complete(tools=[{}]), 400, "tools"),
    (complete(watermarking=True), 400, "watermarking"),
    (complete(repetition_detection={"max_pattern_size": 3}), 400, "repetition_detection"),
    (chat(truncation_side="up"), 400, "truncation_side"),
    (chat(truncation_side="left"), 400, "truncation_side"),
    (complete(truncation_side="right"), 400, "truncation_side"),
]


@pytest.mark.parametrize(("sent", "status", "param"), BAD)
async def test_a_request_is_refused_and_the_next_one_is_served(
    client: httpx.AsyncClient, sent: tuple[str, str | bytes], status: int, param: str | None
) -> None:
    route, body = sent
    headers = {"content-type": "application/json"}
    response = await client.post(route, content=body, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 400
    good = await client.post(COMPLETION, json={"prompt": "hi", "max_tokens": 1})
    assert good.status_code == 200, good.text


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (
            message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type is 'image_url', which is not supported; send parts of "
            "type text",
        ),
        (
            message(role="function"),
            "messages[0].role is 'function', which is not supported; use tool_calls and the role "
            "tool",
        ),
        (chat(store=True), "store is true, which is not supported; remove it"),
        (
            chat(max_tokens=5, max_completion_tokens=6),
            "max_tokens is 5 and max_completion_tokens is 6; give one",
        ),
        (
            chat(truncation_side="right"),
            "truncation_side is right, which needs truncate_prompt_tokens; set it or remove "
            "truncation_side",
        ),
        (
            complete(request_id="my id"),
            "request_id is 'my id': give visible ASCII characters without blanks",
        ),
    ],
)
async def test_an_error_names_the_field_the_value_and_the_remedy(
    client: httpx.AsyncClient, sent: tuple[str, str], said: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(sent[0], content=sent[1], headers=headers)
    assert response.json()["error"]["message"] == said


NEUTRAL = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "guided_json": None,
    "service_tier": "flex",
    "stream_interval": 4,
    "session_id": "s",
    "safety_identifier": "s",
    "prompt_cache_retention": "24h",
    "user": "someone",
    "metadata": {"purpose": "test", "trial": 1},
    "temperature": None,
    "stop": None,
    "seed": None,
    "max_tokens": None,
    "top_k": -1,
    "priority": -3,
}


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    only_chat = {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "store": False,
        "verbosity": "low",
        "audio": None,
        "max_completion_tokens": 3,
        "chat_template_kwargs": {"enable_thinking": False, "deep": nested(10)},
    }
    only_completions = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None}
    for route, body in (chat(**NEUTRAL, **only_chat), complete(**NEUTRAL, **only_completions)):
        headers = {"content-type": "application/json; charset=utf-8"}
        response = await client.post(route, content=body, headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_refused(
    client: httpx.AsyncClient, content_type: str
) -> None:
    response = await client.post(
        COMPLETION, content='{"prompt": "hi"}', headers={"content-type": content_type}
    )
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_content_type"


async def test_unknown_routes_and_methods_are_refused(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/moderations")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    wrong = await client.get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "POST" in wrong.json()["error"]["message"]
    unknown = await client.get("/v1/models/org/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


LONG = "x" * 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(truncation_side=LONG),
        chat(prediction={"type": LONG, "content": "a"}),
        chat(logit_bias={LONG: 1}),
        tools({"name": "f"}, tool_choice=LONG),
        tools({"name": "f"}, tool_choice={"type": LONG, "function": {"name": "f"}}),
        tools({"name": "f"}, tool_choice={"type": "function", "function": {"name": LONG}}),
        tools({"name": LONG}),
        ("/v1/embeddings", json.dumps({"input": "a", "encoding_format": LONG})),
        ("/v1/embeddings", json.dumps({"input": "a", "truncation_side": LONG})),
        complete(model=LONG),
    ],
)
async def test_values_that_are_cut_in_messages_say_so(
    client: httpx.AsyncClient, path: str, body: str
) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    message = answer.json()["error"]["message"]
    assert "xxxxxxxxxxxxx..." in message
    assert LONG[:201] not in message


@pytest.mark.parametrize(("endpoint", "words"), ABSENT.items())
async def test_endpoints_of_vllm_are_refused_with_the_words_of_the_table(
    client: httpx.AsyncClient, endpoint: str, words: str
) -> None:
    method, _, path = endpoint.replace("{id}", "resp_1").partition(" ")
    answer = await client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"there is no route {method} {path}: {words}"
    assert f"| `{endpoint}` | 404: {words} |" in API_PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/embeddings/", "/v1/embeddings"),
    ],
)
async def test_a_path_of_a_wrong_base_url_is_refused_with_the_right_one(
    client: httpx.AsyncClient, path: str, meant: str
) -> None:
    answer = await client.post(path, json={})
    assert answer.status_code == 404
    assert f"POST {path}: use {meant}; the client's base URL" in answer.json()["error"]["message"]


async def test_a_path_that_is_like_no_other_has_no_advice(client: httpx.AsyncClient) -> None:
    for path in ("/v1/", "/favicon.ico"):
        message = (await client.get(path)).json()["error"]["message"]
        assert message == f"there is no route GET {path}"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (*complete(prompt=None), "prompt is null: it must be a string, token ids, or an array"),
        (
            *complete(guided_json=[]),
            "guided_json is an array: it must be an object, or an object's",
        ),
        (
            *chat(structured_outputs={"json": True}),
            "structured_outputs.json is true: it must be an object, or an object's JSON",
        ),
        (
            *chat(structured_outputs={"structural_tag": 5}),
            "structured_outputs.structural_tag is 5: it must be an object, or an object's JSON",
        ),
        (
            "/v1/messages",
            json.dumps(
                {
                    "max_tokens": 1,
                    "messages": [
                        {
                            "role": "assistant",
                            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                        }
                    ],
                }
            ),
            "messages[0].content has a tool_use, which cannot be continued; send its tool_result",
        ),
    ],
)
async def test_messages_of_errors_speak_of_json(
    client: httpx.AsyncClient, path: str, body: str, message: str
) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


async def test_models_are_listed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert (await client.get("/v1/models/scripted")).json() == listed["data"][0]
