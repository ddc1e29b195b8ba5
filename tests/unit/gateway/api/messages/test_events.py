"""Streams of messages: Anthropic's order, and the resulting message."""

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from pagewire.gateway.api.messages.events import INVALID, MessageForm
from pagewire.gateway.errors import ApiError
from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
)
from pagewire.v1 import inference_pb2 as pb
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

FORM = MessageForm("m")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def kinds(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Names of events; of those with a block or a delta its type."""
    found = []
    for name, data in events:
        inner = data.get("content_block") or data.get("delta") or {}
        found.append(inner.get("type", name))
    return found


def test_a_text() -> None:
    events = streamed(FORM, ANSWER, STOP)
    assert kinds(events) == [
        "message_start",
        "ping",
        "text",
        "text_delta",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0][1]["message"], events[-2][1]
    assert start["usage"]["input_tokens"] == 11
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }


def test_thinking_and_calls() -> None:
    events = streamed(FORM, CALLS, STOP)
    assert kinds(events)[2:-2] == [
        "thinking",
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "text",
        "text_delta",
        "content_block_stop",
        "tool_use",
        "input_json_delta",
        "input_json_delta",
        "content_block_stop",
        "tool_use",
        "input_json_delta",
        "content_block_stop",
    ]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    thinking, text, weather, time = Message.model_validate(whole(FORM, CALLS, STOP)).content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Let me see."
    assert thinking.signature
    assert text.type == "text"
    assert weather.type == time.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", {"city": "Ulm"})
    assert (time.name, time.input) == ("time", {})
    assert weather.id != time.id


@pytest.mark.parametrize("output", [ANSWER, CALLS, CUT, []])
@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_the_client_collects_the_stream_to_the_whole_message(
    output: list[Event], finish: pb.Finish
) -> None:
    snapshot: Any = None
    pieces: dict[int, bytes] = {}
    for name, data in streamed(FORM, output, finish):
        if name == "ping":
            continue
        event = EVENT.validate_python(data)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=pieces)
    expected = Message.model_validate(whole(FORM, output, finish))
    found = Message.model_validate(snapshot.model_dump())
    if output is CUT:  # the client completes the partial JSON
        found.content[0].input = expected.content[0].input
    assert without_ids(found.model_dump()) == without_ids(expected.model_dump())


@pytest.mark.parametrize(
    ("output", "finish", "reason", "sequence"),
    [
        (ANSWER, LENGTH, "max_tokens", None),
        (CUT, LENGTH, "max_tokens", None),
        (CALLS, STOP, "tool_use", None),
        (CUT, STOP, "end_turn", None),
        (ANSWER, pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="X"), "stop_sequence", "X"),
        (ANSWER, pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=5), "end_turn", None),
    ],
)
def test_stop_reasons(
    output: list[Event], finish: pb.Finish, reason: str, sequence: str | None
) -> None:
    message = whole(FORM, output, finish)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("arguments", ["{city: 1}", '{"a": NaN}', "[1]", '"x"', "{" * 9000])
def test_an_input_that_is_no_object_is_kept_as_a_text(arguments: str) -> None:
    output = [CallBegin(0, "f"), CallArguments(0, arguments), CallEnd(0)]
    [block] = whole(FORM, output, STOP)["content"]
    assert block["input"] == {INVALID: arguments}


def test_a_call_without_arguments_has_an_empty_input() -> None:
    [block] = whole(FORM, [CallBegin(0, "f"), CallEnd(0)], STOP)["content"]
    assert block["input"] == {}


def test_an_empty_answer_has_no_blocks() -> None:
    assert whole(FORM, [], STOP)["content"] == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, "overloaded_error"), (500, "api_error"), (429, "rate_limit_error")],
)
def test_a_stream_that_fails(status: int, kind: str) -> None:
    events = failed(FORM, [Content("Hel")], ApiError(status, "lost"))
    name, data = events[-1]
    assert (name, data["error"]) == ("error", {"type": kind, "message": "lost"})
