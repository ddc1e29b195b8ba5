"""Nearly valid HTTP requests to a stack with the embedded model.

Every answer must be a success or an error in OpenAI's format: no 5xx, no broken stream.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from pagewire.gateway.api.chat import ChatRequest
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.messages.request import MessagesRequest
from pagewire.gateway.api.responses.request import ResponsesRequest
from pagewire.gateway.api.unsupported import CHAT, COMPLETION
from pagewire.gateway.http.openapi import PATH
from support.clients.mutation import mutated_bytes, mutated_json
from support.processes.stack_process import RunningStack

Inputs = Callable[[str], int]
Tally = Callable[[str], Counter[str]]

LANES = 16
TURN = {"role": "user", "content": "Hi"}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "model": "pagewire-chat",
            "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, TURN],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["e"],
            "seed": 1,
            "chat_template_kwargs": {"a": [1, {"b": None}]},
        },
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [], "content": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "instructions": "x",
            "max_output_tokens": 2,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, "stream": True}),
    (
        "/v1/messages",
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "x"}],
            "messages": [
                TURN,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}],
                },
            ],
            "stop_sequences": ["e"],
            "thinking": {"type": "adaptive"},
        },
    ),
    ("/v1/messages", {"max_tokens": 2, "messages": [TURN], "stream": True}),
    ("/v1/messages/count_tokens", {"messages": [TURN], "tool_choice": {"type": "none"}}),
    ("/tokenize", {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [TURN], "add_generation_prompt": False, "chat_template_kwargs": {}}),
    ("/detokenize", {"model": "pagewire-chat", "tokens": [1, 2, 3]}),
    (
        "/v1/completions",
        {
            "prompt": [[1, 2], [3]],
            "max_tokens": 2,
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"3": 1.5, "200": -100},
            "min_tokens": 1,
            "stop_token_ids": [5],
            "ignore_eos": True,
        },
    ),
]
# Their answers are not JSON.
NOT_JSON = ("/health", "/ping", "/metrics")
_MODELS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
FIELDS = sorted({*CHAT, *COMPLETION, *(name for model in _MODELS for name in model.model_fields)})


def assert_serves(stack: RunningStack) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def verdict(status: int, kind: str, body: bytes) -> str:
    """The kind of an answer, as it is counted; AssertionError if no client may get it."""
    if status == 504:
        assert b"deadline_ms" in body, body[:500]
        return "504 by its own deadline"
    assert 200 <= status < 500, f"{status}: {body[:500]!r}"
    if status == 200 and kind.startswith("text/event-stream"):
        events = body.decode().split("\n\n")
        if events[0].startswith("event: "):
            return verdict_of_named_events(events)
        if '"code":"deadline_exceeded"' in events[-2]:
            assert "its deadline_ms" in events[-2], body[-300:]
            return "streamed until its own deadline"
        assert events[-2:] == ["data: [DONE]", ""], body[-300:]
        for event in events[:-2]:
            assert "choices" in json.loads(event.removeprefix("data: ")), event
        return "streamed"
    answer = json.loads(body)
    if status != 200:
        assert answer["error"]["message"], body
    return str(status)


def verdict_of_named_events(events: list[str]) -> str:
    """The same for a stream of named events."""
    assert events[-1] == ""
    pairs = [event.partition("\n") for event in events[:-1]]
    for name, _, data in pairs:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    last = pairs[-1][0].removeprefix("event: ")
    if last in ("error", "response.failed"):
        assert "its deadline_ms" in events[-2], events[-2]
        return "streamed until its own deadline"
    assert last in ("message_stop", "response.completed", "response.incomplete"), last
    return "streamed"


def test_schemathesis(stack: RunningStack, inputs: Inputs, tally: Tally) -> None:
    """Valid and invalid requests, generated from the OpenAPI document."""
    schema = schemathesis.openapi.from_url(f"{stack.url}{PATH}")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {path for path, _ in SEEDS}
    counts = tally("schemathesis")
    for operation in operations:
        if operation.path in NOT_JSON:
            continue
        modes = [GenerationMode.POSITIVE]
        if operation.method == "post":  # a GET has no parameters that could be invalid
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            _send(operation.as_strategy(generation_mode=mode), inputs, counts, stack.url)
    assert_serves(stack)


def _send(cases: Any, inputs: Inputs, counts: Counter[str], url: str) -> None:
    @settings(
        max_examples=max(1, inputs("schemathesis") // 6),
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def send(case: schemathesis.Case) -> None:
        # `case.call` would read only the first events of a stream.
        response = requests.request(**case.as_transport_kwargs(base_url=url), timeout=60)
        kind = response.headers.get("content-type", "")
        counts[verdict(response.status_code, kind, response.content)] += 1

    send()


async def test_bodies(stack: RunningStack, inputs: Inputs, tally: Tally) -> None:
    """Valid bodies with mutated values or mutated bytes."""
    counts = tally("http bodies")
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(stack.url, timeout=timeout) as session:

        async def lane(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(inputs("http bodies") // LANES):
                path, data = _body(rng)
                headers = {"content-type": "application/json"}
                async with session.post(path, data=data, headers=headers) as response:
                    kind = response.headers.get("content-type", "")
                    try:
                        counts[verdict(response.status, kind, await response.read())] += 1
                    except AssertionError as error:
                        raise AssertionError(f"{path} {data[:2000]!r}") from error

        await asyncio.gather(*(lane(seed) for seed in range(LANES)))
    await asyncio.to_thread(assert_serves, stack)


def _body(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(SEEDS)
    for _ in range(rng.randint(0, 3)):
        body = mutated_json(rng, body, FIELDS)
    data = json.dumps(body).encode()
    return path, mutated_bytes(rng, data) if rng.random() < 0.2 else data


HEADS = [
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /v1/models/pagewire%2Dchat HTTP/1.1\r\nhost: x\r\naccept: */*\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'content-length: 28\r\n\r\n{"prompt":"a","max_tokens":1}',
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'transfer-encoding: chunked\r\n\r\n5\r\n{"mes\r\n3\r\nsag\r\n0\r\n\r\n',
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
]


async def test_bytes(stack: RunningStack, inputs: Inputs, tally: Tally) -> None:
    """Mutated HTTP messages: the server may answer an error or nothing, but no 5xx except 505."""
    counts = tally("http bytes")
    host, _, port = stack.url.removeprefix("http://").rpartition(":")

    async def lane(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(inputs("http bytes") // LANES):
            data = mutated_bytes(rng, rng.choice(HEADS))
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            try:
                writer.write_eof()
                line = await asyncio.wait_for(reader.readline(), 0.5)
            except TimeoutError:
                line = b""
            except OSError:
                line = b""
            writer.close()
            status = line.split()[1].decode() if line else "no answer"
            assert not status.startswith("5") or status == "505", (data, line)
            counts[status] += 1

    await asyncio.gather(*(lane(seed) for seed in range(LANES)))
    await asyncio.to_thread(assert_serves, stack)
