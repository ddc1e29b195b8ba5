"""The form of a chat's reasoning and tool calls: as deltas, and as a whole message."""

import secrets
import string
from collections.abc import Iterable
from typing import Any

from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from pagewire.v1 import inference_pb2 as pb

_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID = 9


def new_call_id(short: bool) -> str:
    """An id of a tool call; a short one has nine letters and digits, see ToolFormat."""
    if short:
        return "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_ID))
    return f"call_{secrets.token_hex(12)}"


def delta_of(event: Event, short_ids: bool) -> dict[str, Any] | None:
    """The delta of an event; None for an event that adds nothing to the message."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": new_call_id(short_ids), "type": "function"}
        return {"tool_calls": [{**call, "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]}
    return None


def message_of(events: Iterable[Event], short_ids: bool) -> dict[str, Any]:
    """The whole message; its content is null if there is none beside reasoning and calls."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            calls.append((event.name, []))
        elif isinstance(event, CallArguments):
            calls[-1][1].append(event.json)
    text = "".join(content) if content or not (calls or reasoning) else None
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            {
                "id": new_call_id(short_ids),
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for name, arguments in calls
        ]
    return message


def with_calls(choice: dict[str, Any], finish: pb.Finish, has_calls: bool) -> dict[str, Any]:
    """The last part of a choice, whose reason is tool_calls if it has calls and was not cut off."""
    if has_calls and finish.reason == pb.FINISH_REASON_STOP:
        return {**choice, "finish_reason": "tool_calls"}
    return choice
