"""Streams of responses: OpenAI's order, and the resulting response."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pagewire.gateway.api.events import members
from pagewire.gateway.api.responses.events import ResponseForm
from pagewire.gateway.api.responses.response import ResponseHead
from pagewire.gateway.errors import ApiError
from pagewire.gateway.parsers.events import Content, Event
from support.output_events import (
    ANSWER,
    CALLS,
    CUT,
    LENGTH,
    STOP,
    failed,
    streamed,
    whole,
    without_ids,
)

REPEATED = {
    "model": "m",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "instructions": 'say "hi"',
    "store": False,
}
FORM = ResponseForm(ResponseHead(members(REPEATED)))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def names(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [name.removeprefix("response.") for name, _ in events]


def test_a_message() -> None:
    events = streamed(FORM, ANSWER, STOP)
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    response = Response.model_validate(events[-1][1]["response"])
    assert response.output_text == 'Hello "you" 🙂'
    assert response.status == "completed"
    assert response.instructions == 'say "hi"'
    assert response.usage is not None
    assert response.usage.model_dump(exclude_none=True) == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


def test_reasoning_and_calls() -> None:
    events = streamed(FORM, CALLS, STOP, reasoning=5)
    assert names(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    response = Response.model_validate(events[-1][1]["response"])
    reasoning, message, weather, time = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Let me see."]
    assert message.type == "message"
    assert weather.type == time.type == "function_call"
    assert (weather.name, weather.arguments) == ("weather", '{"city": "Ulm"}')
    assert (time.name, time.arguments) == ("time", "{}")
    assert weather.call_id != time.call_id
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize("output", [ANSWER, CALLS, CUT, []])
@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_every_event_is_one_of_openai_and_refers_to_its_item(
    output: list[Event], finish: Any
) -> None:
    events = streamed(FORM, output, finish)
    items: list[dict[str, Any]] = []
    for _, data in events:
        EVENT.validate_python(data)
        if data["type"] == "response.output_item.added":
            assert data["output_index"] == len(items)
            items.append(data["item"])
        elif "output_index" in data:
            assert data["output_index"] == len(items) - 1
            assert data.get("item_id", items[-1]["id"]) == items[-1]["id"]
    final = events[-1][1]["response"]
    assert [item["id"] for item in final["output"]] == [item["id"] for item in items]
    done = [data["item"] for _, data in events if data["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert without_ids(whole(FORM, output, finish)) == without_ids(final)


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    events = streamed(FORM, CUT, LENGTH)
    assert names(events)[-1] == "incomplete"
    response = Response.model_validate(events[-1][1]["response"])
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [call] = response.output
    assert call.type == "function_call"
    assert (call.status, call.arguments) == ("incomplete", '{"city": "U')
    assert response.completed_at is None


def test_a_call_that_a_stop_string_cuts_off_is_incomplete() -> None:
    response = Response.model_validate(whole(FORM, CUT, STOP))
    [call] = response.output
    assert call.type == "function_call"
    assert (response.status, call.status) == ("completed", "incomplete")


def test_an_empty_answer_is_an_empty_message() -> None:
    response = Response.model_validate(whole(FORM, [], STOP))
    assert (len(response.output), response.output_text) == (1, "")


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (429, "rate_limit_exceeded")])
def test_a_stream_that_fails(status: int, code: str) -> None:
    events = failed(FORM, [Content("Hel")], ApiError(status, "lost"))
    assert names(events)[-2:] == ["output_item.done", "failed"]
    response = Response.model_validate(events[-1][1]["response"])
    assert response.error is not None
    assert (response.error.code, response.error.message) == (code, "lost")
    assert (response.status, response.output_text) == ("failed", "Hel")


def test_calls_of_models_with_short_ids() -> None:
    [call] = whole(ResponseForm(FORM.head, short_ids=True), CUT, STOP)["output"]
    assert len(call["call_id"]) == 9


def test_what_repeats_the_request_is_not_copied() -> None:
    """It may have megabytes, whose copies must not block the event loop."""
    answer = FORM.events(True)
    begin, end = answer.begin(1), answer.finish(STOP, None)
    counts = [sum(piece is FORM.head.repeated for piece in pieces) for pieces in (begin, end)]
    assert counts == [2, 1]
