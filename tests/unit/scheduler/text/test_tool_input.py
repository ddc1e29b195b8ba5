"""Tools and tool calls as clients of the gRPC API send them."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.scheduler.text.tool_input import template_message, template_tools
from pagewire.v1 import inference_pb2 as pb


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"properties": value}
    return value


def test_a_tool_that_is_nested_too_deeply_is_named() -> None:
    good = {"type": "function", "function": {"name": "f", "parameters": nested(37)}}
    assert template_tools(json.dumps([good, good]), 2) == [good, good]
    bad = {"type": "function", "function": {"name": "f", "parameters": nested(38)}}
    with pytest.raises(RequestError, match=r"tools\[1\] is nested deeper than 39") as refused:
        template_tools(json.dumps([good, bad]), 2)
    assert refused.value.field == "tools[1]"


def test_a_call_that_is_nested_too_deeply_is_named() -> None:
    message = pb.ChatMessage(role="assistant", tool_calls=json.dumps([{}, nested(40)]))
    with pytest.raises(RequestError) as refused:
        template_message(message, 3)
    assert refused.value.field == "messages[3].tool_calls[1]"
