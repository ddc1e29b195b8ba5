"""Tool calls and reasoning with OpenAI's client against real processes.

The worker writes the text that the prompt asks for, because a tiny model cannot call tools.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from support.processes.fleet import Fleet
from support.scripted.asked_text import ask, call

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ARGUMENTS = '{"city": "Köln 🙂 \\"}\\"", "days": [1, {"x": 2}]}'


TWO_CALLS = f"Let me look.\n\n{call('weather', ARGUMENTS)}\n{call('time', '{}')}"
THOUGHTS = "<think>\nIs it warm?\nI look.\n</think>\n\n"


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "text", "messages": [{"role": "user", "content": ask(text)}], **fields}


async def collected(client: openai.AsyncOpenAI, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message and finish reason from all deltas of a stream, and the chunks."""
    message: dict[str, Any] = {"content": None, "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    chunks = []
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        chunks.append(chunk)
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            if delta.get("content") is not None:
                message["content"] = (message["content"] or "") + delta["content"]
            for name in ("reasoning_content", "reasoning"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                if part["id"] is not None:
                    assert part["index"] == len(calls)
                    calls.append({"id": part["id"], "name": part["function"]["name"], "json": ""})
                calls[part["index"]]["json"] += part["function"]["arguments"]
            message["finish_reason"] = choice.finish_reason
    return {**message, "calls": calls}, chunks


async def test_a_whole_answer_has_the_calls(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**said(TWO_CALLS, tools=TOOLS))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    calls = choice.message.tool_calls
    assert [(each.type, each.function.name) for each in calls] == [
        ("function", "weather"),
        ("function", "time"),
    ]
    assert json.loads(calls[0].function.arguments)["city"] == 'Köln 🙂 "}"'
    assert calls[0].function.arguments == ARGUMENTS
    assert len({each.id for each in calls}) == 2
    assert all(each.id.startswith("call_") for each in calls)


async def test_a_stream_adds_up_to_the_same(client: openai.AsyncOpenAI) -> None:
    message, chunks = await collected(client, **said(TWO_CALLS, tools=TOOLS))
    assert message["content"] == "Let me look."
    assert [(each["name"], each["json"]) for each in message["calls"]] == [
        ("weather", ARGUMENTS),
        ("time", "{}"),
    ]
    assert message["finish_reason"] == "tool_calls"
    assert len(chunks) > 10, "arguments stream"


async def test_content_is_null_with_calls_only(client: openai.AsyncOpenAI) -> None:
    request = said(call("time", "{}"), tools=TOOLS)
    answer = await client.chat.completions.create(**request)
    assert answer.choices[0].message.content is None
    message, _ = await collected(client, **request)
    assert message["content"] is None
    assert [each["name"] for each in message["calls"]] == ["time"]


async def test_without_tools_a_call_is_text(client: openai.AsyncOpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = await client.chat.completions.create(**said(TWO_CALLS, **fields))
        assert answer.choices[0].message.content == TWO_CALLS
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


async def test_one_call_only_if_they_are_not_parallel(client: openai.AsyncOpenAI) -> None:
    for fields in ({"parallel_tool_calls": False}, {"extra_body": {"max_tool_calls": 1}}):
        answer = await client.chat.completions.create(**said(TWO_CALLS, tools=TOOLS, **fields))
        calls = answer.choices[0].message.tool_calls
        assert [each.function.name for each in calls] == ["weather"]


async def test_a_call_that_is_cut_off_ends_with_length(client: openai.AsyncOpenAI) -> None:
    request = said(call("weather", ARGUMENTS), tools=TOOLS, max_tokens=60)
    answer = await client.chat.completions.create(**request)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    assert ARGUMENTS.startswith(arguments)
    message, _ = await collected(client, **request)
    assert message["calls"][0]["json"] == arguments
    assert message["finish_reason"] == "length"


async def test_a_conversation_goes_on_after_calls(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(**said(TWO_CALLS, tools=TOOLS))
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in message.tool_calls
    ]
    done = {"role": "user", "content": ask("It is sunny.")}
    answer = await client.chat.completions.create(
        model="text",
        messages=[said(TWO_CALLS)["messages"][0], message, *results, done],
        tools=TOOLS,
    )
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens


async def test_several_choices_logprobs_stop_and_usage(client: openai.AsyncOpenAI) -> None:
    request = said(TWO_CALLS, tools=TOOLS, n=2, logprobs=True, top_logprobs=2, stop=["\n</tool"])
    answer = await client.chat.completions.create(**request)
    assert len(answer.choices) == 2
    tokens = 0
    for choice in answer.choices:
        assert [each.function.name for each in choice.message.tool_calls] == ["weather"]
        assert choice.finish_reason == "tool_calls"
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
        tokens += len(choice.logprobs.content)
    assert answer.usage.completion_tokens == tokens
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    usage = None
    options = {"include_usage": True}
    stream = await client.chat.completions.create(**request, stream=True, stream_options=options)
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
        usage = chunk.usage or usage
    assert sum(map(len, streamed.values())) == tokens == usage.completion_tokens


async def test_reasoning_stands_apart(client: openai.AsyncOpenAI) -> None:
    text = THOUGHTS + TWO_CALLS
    request = said(text, tools=TOOLS)
    whole = await client.chat.completions.create(**request)
    message = whole.choices[0].message.model_dump()
    streamed, chunks = await collected(client, **request, stream_options={"include_usage": True})
    for name in ("reasoning_content", "reasoning"):
        assert message[name] == streamed[name] == "Is it warm?\nI look."
    assert message["content"] == streamed["content"] == "Let me look."
    assert len(message["tool_calls"]) == len(streamed["calls"]) == 2
    for usage in (whole.usage, chunks[-1].usage):
        counted = usage.completion_tokens_details.reasoning_tokens
        assert 0 < counted < usage.completion_tokens
    answer = await client.chat.completions.create(**said("<think>" + "so " * 500, max_tokens=10))
    assert answer.usage.completion_tokens_details.reasoning_tokens == 10
    assert answer.choices[0].message.content is None


async def test_reasoning_may_be_left_out(client: openai.AsyncOpenAI) -> None:
    request = said(THOUGHTS + "Yes.", extra_body={"include_reasoning": False})
    answer = await client.chat.completions.create(**request)
    assert answer.choices[0].message.content == "Yes."
    assert "reasoning" not in answer.choices[0].message.model_dump()
    message, _ = await collected(client, **request)
    assert (message["content"], message["reasoning"]) == ("Yes.", "")


async def test_thinking_is_turned_off_by_effort_and_by_variable(
    client: openai.AsyncOpenAI, fleet: Fleet
) -> None:
    asked = said("Yes.")
    thinking = (await client.chat.completions.create(**asked)).usage.prompt_tokens
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        answer = await client.chat.completions.create(**asked, **fields)
        assert answer.usage.prompt_tokens > thinking, "the prompt has empty reasoning"
        assert answer.choices[0].message.content == "Yes."


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
@pytest.mark.parametrize("text", [TWO_CALLS * 2, "<think>" + "and so on " * 30 + "</think>Yes."])
async def test_a_killed_process_changes_nothing(fleet: Fleet, victim: str, text: str) -> None:
    body = said(text, tools=TOOLS, stream=True, seed=1)
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=120) as http:
        want = without_ids([line async for line in _lines(http, body)])
        since, killed = len(fleet.log), False
        got = []
        async for line in _lines(http, body):
            got.append(line)
            if len(got) == 15:
                fleet.signal(victim, signal.SIGKILL)
                killed = True
        assert killed
        assert merged(without_ids(got)) == merged(want)
        await fleet.until_restarted(victim, since=since)
        async with asyncio.timeout(60):
            while not await fleet.is_idle(1):
                await asyncio.sleep(0.05)


async def _lines(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                yield line


def without_ids(lines: list[str]) -> list[dict[str, Any]]:
    """The deltas of a stream, without ids of calls."""
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in deltas:
        for part in choice["delta"].get("tool_calls", ()):
            part.pop("id", None)
    return deltas


def merged(deltas: list[dict[str, Any]]) -> list[Any]:
    """The output in order, with neighbouring pieces of a kind joined: their cuts may differ."""
    output: list[Any] = []
    for choice in deltas:
        for name, value in choice["delta"].items():
            for part in value if name == "tool_calls" else [value]:
                key, text = name, part
                if name == "tool_calls":
                    key = f"call {part['index']} {part['function'].get('name', '')}"
                    text = part["function"]["arguments"]
                    if not part["function"].get("name"):
                        key = f"arguments {part['index']}"
                if output and output[-1][0] == key and isinstance(text, str):
                    output[-1][1] = (output[-1][1] or "") + text
                else:
                    output.append([key, text])
    return [*output, deltas[-1]["finish_reason"]]
