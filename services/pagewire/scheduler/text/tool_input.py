"""Tools and tool calls of a conversation, as chat templates get them from transformers."""

import json
from typing import Any

from pagewire.errors import invalid
from pagewire.scheduler.text.tokenizer import TextBounds
from pagewire.v1 import inference_pb2 as pb

# Levels of one tool or call. A template may indent JSON, so the text of a value grows with its
# depth. The arguments of a call are two levels further down.
_MAX_DEPTH = 39


def json_values(chat: pb.ChatInput) -> int:
    """An upper bound on the JSON values in the tools and calls of a conversation."""
    texts = [chat.tools, *(message.tool_calls for message in chat.messages)]
    return sum(1 + sum(map(text.count, ",[{")) for text in texts if text)


def check_tool_input(chat: pb.ChatInput, bounds: TextBounds) -> None:
    """RequestError for more tools, or more JSON, than the settings allow."""
    calls = sum(len(message.tool_calls.encode()) for message in chat.messages)
    size = len(chat.tools.encode()) + calls
    for count, limit, what, name in (
        (size, 2 * bounds.max_tool_bytes, "bytes", "max_tool_bytes"),
        (json_values(chat), 2 * bounds.max_tool_nodes, "values", "max_tool_nodes"),
    ):
        if count > limit:
            raise invalid(
                "tools",
                f"tools and tool calls have {count} {what} of JSON; give {limit} at most (twice "
                f"{name})",
            )


def template_tools(text: str, max_tools: int) -> list[dict[str, Any]]:
    """The tools from their JSON."""
    tools = _objects(text, "tools")
    if len(tools) > max_tools:
        raise invalid(
            "tools", f"tools has {len(tools)} entries; give {max_tools} at most (max_tools)"
        )
    return tools


def template_message(message: pb.ChatMessage, index: int) -> dict[str, Any]:
    """A turn as the template gets it; keys that the client does not give are left out."""
    if message.null_content and message.content:
        field = f"messages[{index}].null_content"
        raise invalid(field, f"{field} is true, and the message has content; remove one")
    entry: dict[str, Any] = {
        "role": message.role,
        "content": None if message.null_content else message.content,
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            entry[name] = getattr(message, name)
    # gpt-oss has this name for reasoning, and accepts it beside calls only if there is no text.
    if message.HasField("reasoning_content") and not (message.tool_calls and message.content):
        entry["thinking"] = message.reasoning_content
    if message.tool_calls:
        entry["tool_calls"] = _objects(message.tool_calls, f"messages[{index}].tool_calls")
    return entry


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    """An array of objects from its JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{field} is not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(field, f"{field} is not a JSON array of objects")
    for index, item in enumerate(value):
        if not _within(item, _MAX_DEPTH):
            place = f"{field}[{index}]"
            raise invalid(place, f"{place} is nested deeper than {_MAX_DEPTH} levels; flatten it")
    return value


def _within(value: Any, levels: int) -> bool:
    """Whether a JSON value has at most `levels` levels."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_within(item, levels - 1) for item in inner)
