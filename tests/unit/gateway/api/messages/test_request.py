"""Requests to /v1/messages: their conversations, and refusals."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.messages.request import MessagesRequest, messages_request_model
from pagewire.gateway.api.validation import validate
from pagewire.gateway.conversation.tools import ToolChoice
from pagewire.gateway.conversation.turns import ToolCall, Turn
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.unknown_fields import check_extras

MODEL = messages_request_model(20)
HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def parse(**fields: Any) -> MessagesRequest:
    body = {"max_tokens": 5, "messages": [HI], **fields}
    request = validate(MODEL, json.dumps(body).encode()).checked_stop()
    check_extras(request, False)
    return request


def read(**fields: Any) -> None:
    """Runs all stages of a request before it is sent."""
    body = {"max_tokens": 5, "messages": [HI], **fields}
    request = validate(MODEL, json.dumps(body).encode())
    request.job("m", ServedModel(100, "hermes"), BodyLimits())
    check_extras(request, False)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def turns(*messages: Any, **fields: Any) -> list[Turn]:
    return parse(messages=list(messages), **fields).to_conversation().turns


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_system_and_texts() -> None:
    assert turns(HI, system="Be brief.") == [Turn("system", "Be brief."), Turn("user", "Hi")]
    blocks = [text("Be"), text("brief.")]
    assert turns(user(text("a"), text("b")), system=blocks) == [
        Turn("system", "Be\nbrief."),
        Turn("user", "a\nb"),
    ]


def test_texts_of_the_user_that_follow_each_other_are_one_turn() -> None:
    assert turns(HI, HI, {"role": "assistant", "content": "x"}, HI) == [
        Turn("user", "Hi\nHi"),
        Turn("assistant", "x"),
        Turn("user", "Hi"),
    ]


def test_thinking_calls_and_results() -> None:
    assistant = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            text("I look."),
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "ü"}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ],
    }
    results = user(
        {"type": "tool_result", "tool_use_id": "t1", "content": "7"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "content": [text("no"), text("way")],
            "is_error": True,
        },
        text("And now?"),
    )
    place = "messages[1].content"
    calls = (
        ToolCall("t1", "f", '{"a": "ü"}', f"{place}[2].input"),
        ToolCall("t2", "g", "{}", f"{place}[3].input"),
    )
    assert turns(HI, assistant, results) == [
        Turn("user", "Hi"),
        Turn("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        Turn("tool", "7", tool_call_id="t1"),
        Turn("tool", "Error: no\nway", tool_call_id="t2"),
        Turn("user", "And now?"),
    ]


def test_an_answer_may_be_begun() -> None:
    request = parse(messages=[HI, {"role": "assistant", "content": "x"}])
    assert request.continues
    assert not request.to_conversation().add_generation_prompt
    assert not parse().continues


def test_a_call_without_text_has_no_content() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    found = turns(HI, {"role": "assistant", "content": [call]}, user(result))
    assert [turn.content for turn in found] == ["Hi", None, ""]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "f"}, ToolChoice("named", "f"), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tools_and_their_choice(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    options = parse(tools=[{**TOOL, "type": "custom"}], tool_choice=choice).to_conversation().tools
    assert (options.choice, options.parallel) == (expected, parallel)
    [tool] = options.tools
    assert (tool.name, tool.description, tool.parameters) == ("f", "d", {"type": "object"})
    assert not tool.strict


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(thinking: Any, thinks: bool) -> None:
    conversation = parse(thinking=thinking).to_conversation()
    assert conversation.variables["enable_thinking"] is thinks
    assert conversation.reasoning.included is thinks


def test_the_form_of_the_text() -> None:
    schema = {"type": "object"}
    asked = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    wanted = asked.wanted_output()
    assert wanted is not None
    assert json.loads(wanted.json_schema) == schema
    assert wanted.field_name == "output_config.format.schema"
    assert parse().wanted_output() is None


def test_stop_sequences_and_effort() -> None:
    request = parse(stop_sequences=["a", "b"], output_config={"effort": "low"}, top_k=3)
    assert request.stop_conditions(request.max_tokens).stop == ["a", "b"]
    assert request.to_conversation().reasoning.effort == "low"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [HI] * 21}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "tool_use", "id": "1", "name": "f", "input": {}})]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    user(
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [{"type": "image", "source": {}}],
                        }
                    )
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": nested(40)}]}, "tools[0].input_schema"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "1", "name": "f", "input": nested(40)}
                        ],
                    },
                    {"role": "user", "content": "go on"},
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "string"}}]},
            "tools[0].input_schema.type",
        ),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "guided_regex": "a",
            },
            "guided_regex",
        ),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management",
        ),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("message", "supported"),
    [
        (user({"type": "image"}), "text and tool_result"),
        (user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}), "text"),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking"}]},
            "text, thinking and tool_use",
        ),
    ],
)
def test_a_refusal_names_the_blocks_of_its_place(message: Any, supported: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(messages=[message])
    assert refused.value.message.endswith(f"; supported here: {supported}")


def test_hints_are_accepted_and_unknown_fields_named() -> None:
    body = {
        "max_tokens": 1,
        "messages": [user({**text("x"), "mood": 1})],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    request = validate(MODEL, json.dumps(body).encode())
    assert check_extras(request, False) == ("messages[].content[].mood",)


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_edits_of_the_context_that_change_nothing_are_accepted(edits: list[Any]) -> None:
    parse(context_management={"edits": edits})
