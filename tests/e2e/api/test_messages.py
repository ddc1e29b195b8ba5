"""/v1/messages with Anthropic's client against real processes."""

import signal
from typing import Any

import anthropic
import httpx
import pytest

from support.clients.named_streams import events_of, merged
from support.processes.fleet import Fleet
from support.processes.fleet_checks import until_idle
from support.scripted.asked_text import ask, call

pytestmark = pytest.mark.asyncio(loop_scope="package")

ARGUMENTS = '{"city": "Köln 🙂 \\"}\\"", "days": [1, {"x": 2}]}'
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "time", "input_schema": {"type": "object"}},
]
THINKS: Any = {"type": "enabled", "budget_tokens": 1024}


CALLS = (
    "<think>\nIs it warm?\n</think>\n\nLet me look.\n\n"
    f"{call('weather', ARGUMENTS)}\n{call('time', '{}')}"
)


def said(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ask(text)}]
    return {"model": "text", "max_tokens": 2000, "messages": messages, **fields}


async def test_a_text(messages_client: anthropic.AsyncAnthropic) -> None:
    message = await messages_client.messages.create(**said("Grüße 🙂", system="Be brief."))
    [block] = message.content
    assert block.type == "text"
    assert block.text == "Grüße 🙂"
    assert (message.type, message.role, message.model) == ("message", "assistant", "text")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens > 5
    counted = await messages_client.messages.count_tokens(
        model="text", messages=said("Grüße 🙂")["messages"], system="Be brief."
    )
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached


async def test_a_stream(messages_client: anthropic.AsyncAnthropic) -> None:
    async with messages_client.messages.stream(**said("Grüße 🙂 to you")) as stream:
        pieces = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(pieces) == "Grüße 🙂 to you"
    assert len(pieces) > 3
    assert final.content[0].type == "text"
    assert final.content[0].text == "Grüße 🙂 to you"
    assert final.usage.output_tokens > 5
    assert final.stop_reason == "end_turn"


async def test_calls_and_thinking(messages_client: anthropic.AsyncAnthropic) -> None:
    request = said(CALLS, tools=TOOLS, thinking=THINKS)
    whole = await messages_client.messages.create(**request)
    async with messages_client.messages.stream(**request) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        thinking, text, weather, time = message.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, bool(thinking.signature)) == ("Is it warm?", True)
        assert text.type == "text"
        assert text.text == "Let me look."
        assert weather.type == time.type == "tool_use"
        assert weather.name == "weather"
        assert weather.input == {"city": 'Köln 🙂 "}"', "days": [1, {"x": 2}]}
        assert (time.name, time.input) == ("time", {})
        assert message.stop_reason == "tool_use"


async def test_thinking_is_shown_only_if_it_is_asked_for(
    messages_client: anthropic.AsyncAnthropic,
) -> None:
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        message = await messages_client.messages.create(**said(CALLS, tools=TOOLS, **thinking))
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]


async def test_one_call_only_if_they_are_not_parallel(
    messages_client: anthropic.AsyncAnthropic,
) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = await messages_client.messages.create(**said(CALLS, tools=TOOLS, tool_choice=choice))
    assert [block.type for block in message.content] == ["text", "tool_use"]
    none: Any = {"type": "none"}
    one = call("time", "{}")
    message = await messages_client.messages.create(**said(one, tools=TOOLS, tool_choice=none))
    [block] = message.content
    assert block.type == "text"
    assert block.text == one


async def test_a_conversation_goes_on_after_calls(
    messages_client: anthropic.AsyncAnthropic,
) -> None:
    first = await messages_client.messages.create(**said(CALLS, tools=TOOLS, thinking=THINKS))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in first.content
        if block.type == "tool_use"
    ]
    assert len(results) == 2
    messages: Any = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": ask("It is sunny.")}]},
    ]
    answer = await messages_client.messages.create(
        model="text", max_tokens=100, messages=messages, tools=TOOLS, thinking=THINKS
    )
    [block] = answer.content
    assert block.type == "text"
    assert block.text == "It is sunny."


async def test_stop_reasons(messages_client: anthropic.AsyncAnthropic) -> None:
    cut = await messages_client.messages.create(**said("word " * 50, max_tokens=10))
    assert cut.stop_reason == "max_tokens"
    stopped = await messages_client.messages.create(
        **said("one two three", stop_sequences=[" three"])
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "one two"


async def test_errors_have_the_form_of_this_api(
    messages_client: anthropic.AsyncAnthropic, fleet: Fleet
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await messages_client.messages.create(**{**said("x"), "model": "none"})
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as invalid:
        await messages_client.messages.create(**said("x", max_tokens=0))
    body = invalid.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await messages_client.messages.create(**said("word " * 9000))
    async with httpx.AsyncClient(base_url=fleet.urls[0]) as http:
        wrong_method = (await http.get("/v1/messages")).json()
        no_json = (await http.post("/v1/messages", content=b"{")).json()
        nowhere = (await http.post("/v1/messages/nowhere", json={})).json()
    assert [each["type"] for each in (wrong_method, no_json, nowhere)] == ["error"] * 3
    assert nowhere["error"]["type"] == "not_found_error"


async def test_models(messages_client: anthropic.AsyncAnthropic) -> None:
    [model] = [model async for model in messages_client.models.list()]
    assert (model.id, model.type, model.display_name) == ("text", "model", "text")
    assert model.created_at.year >= 2024
    assert (await messages_client.models.retrieve("text")).id == "text"


async def test_a_killed_scheduler_changes_nothing(fleet: Fleet) -> None:
    text = CALLS + call("time", '{"zone": "' + "far away " * 20 + '"}')
    body = said(text, tools=TOOLS, thinking=THINKS)
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=120) as http:
        want = [event async for event in events_of(http, "/v1/messages", body)]
        since, got = len(fleet.log), []
        async for event in events_of(http, "/v1/messages", body):
            got.append(event)
            if len(got) == 30:
                fleet.signal("scheduler-0", signal.SIGKILL)
    for events in (want, got):  # the second run may find more of its prompt in the cache
        usage = events[-2]["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert merged(got) == merged(want)
    await fleet.until_restarted("scheduler-0", since=since)
    await until_idle(fleet, 1)
