"""/v1/responses with OpenAI's client against real processes."""

import signal
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from support.clients.named_streams import events_of, merged
from support.processes.fleet import Fleet
from support.processes.fleet_checks import until_idle
from support.scripted.asked_text import ask, call

pytestmark = pytest.mark.asyncio(loop_scope="package")

ARGUMENTS = '{"city": "Köln 🙂 \\"}\\"", "days": [1, {"x": 2}]}'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
THOUGHTS = "<think>\nIs it warm?\n</think>\n\n"


CALLS = f"{THOUGHTS}Let me look.\n\n{call('weather', ARGUMENTS)}\n{call('time', '{}')}"


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "text", "input": ask(text), **fields}


async def test_a_text(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(**said("Grüße 🙂", instructions="Be brief."))
    assert response.output_text == "Grüße 🙂"
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.id.startswith("resp_")
    assert response.model == "text"
    assert response.instructions == "Be brief."
    assert response.model_dump()["store"] is False
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens > 5


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(**said("Grüße 🙂 to you")) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Grüße 🙂 to you"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert len(deltas) > 3
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_calls_and_reasoning(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**said(CALLS, tools=TOOLS))
    async with client.responses.stream(**said(CALLS, tools=TOOLS)) as stream:
        final = await stream.get_final_response()
    for response in (whole, final):
        reasoning, message, weather, time = response.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or ()] == ["Is it warm?"]
        assert message.type == "message"
        assert response.output_text == "Let me look."
        assert weather.type == time.type == "function_call"
        assert (weather.name, weather.arguments) == ("weather", ARGUMENTS)
        assert (time.name, time.arguments) == ("time", "{}")
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_a_conversation_goes_on_after_calls(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(**said(CALLS, tools=TOOLS))
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(results) == 2
    following: Any = [
        {"role": "user", "content": "How is it?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        *results,
        {"role": "user", "content": ask("It is sunny.")},
    ]
    answer = await client.responses.create(model="text", input=following, tools=TOOLS)
    assert answer.output_text == "It is sunny."
    calls = [
        {
            "id": result["call_id"],
            "type": "function",
            "function": {"name": name, "arguments": given},
        }
        for result, name, given in zip(results, ("weather", "time"), (ARGUMENTS, "{}"), strict=True)
    ]
    messages: Any = [
        following[0],
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning": "Is it warm?",
            "tool_calls": calls,
        },
        *[{"role": "tool", "tool_call_id": "x", "content": "sunny"}] * 2,
        following[-1],
    ]
    function = [{"type": "function", "function": _without_type(tool)} for tool in TOOLS]
    chat = await client.chat.completions.create(model="text", messages=messages, tools=function)
    assert chat.usage is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens, "it is the same conversation"


def _without_type(tool: dict[str, Any]) -> Any:
    return {name: value for name, value in tool.items() if name != "type"}


async def test_an_answer_that_is_cut_off(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(**said("word " * 50, max_output_tokens=20))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert ("word " * 50).startswith(response.output_text)
    async with client.responses.stream(**said("word " * 50, max_output_tokens=20)) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"


async def test_what_needs_state_is_refused(client: openai.AsyncOpenAI) -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"store": True}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="no response is stored here") as refused:
            await client.responses.create(**said("x", **fields))
        assert refused.value.param in fields
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="none", input="x")
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.responses.create(model="text", input="x " * 9000)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.param == "input"
    assert "the length of the input" in too_long.value.message
    with pytest.raises(openai.BadRequestError, match="max_output_tokens") as too_long:
        await client.responses.create(model="text", input="x", max_output_tokens=9000)
    assert too_long.value.param == "input"


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_a_killed_process_changes_nothing(fleet: Fleet, victim: str) -> None:
    body = said(CALLS + call("time", '{"zone": "' + "far away " * 20 + '"}'), tools=TOOLS)
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=120) as http:
        want = [event async for event in events_of(http, "/v1/responses", body)]
        since, got = len(fleet.log), []
        async for event in events_of(http, "/v1/responses", body):
            got.append(event)
            if len(got) == 30:
                fleet.signal(victim, signal.SIGKILL)
    Response.model_validate(got[-1]["response"])
    # The second run may find more of its prompt in the cache.
    for events in (want, got):
        events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] = 0
    assert merged(got) == merged(want)
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    await fleet.until_restarted(victim, since=since)
    await until_idle(fleet, 1)
