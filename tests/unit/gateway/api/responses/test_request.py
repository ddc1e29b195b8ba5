"""Requests to /v1/responses: their conversations, and refusals."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.responses.request import ResponsesRequest, responses_request_model
from pagewire.gateway.api.validation import validate
from pagewire.gateway.conversation.tools import ToolChoice
from pagewire.gateway.conversation.turns import ToolCall, Turn
from pagewire.gateway.parsing.unknown_fields import check_extras

MODEL = responses_request_model(20)
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def parse(**fields: Any) -> ResponsesRequest:
    request = validate(MODEL, json.dumps({"input": "Hi", **fields}).encode())
    request.check()
    check_extras(request, False)
    return request


def read(**fields: Any) -> None:
    """Runs all stages of a request before it is sent."""
    request = parse(**fields)
    request.to_conversation()
    request.wanted_output()


def turns(*items: Any, **fields: Any) -> list[Turn]:
    return parse(input=list(items), **fields).to_conversation().turns


def test_a_text_with_instructions() -> None:
    conversation = parse(instructions="Be brief.", reasoning={"effort": "low"}).to_conversation()
    assert conversation.turns == [Turn("system", "Be brief."), Turn("user", "Hi")]
    assert conversation.reasoning.effort == "low"
    assert conversation.tools.tools == ()


def test_messages_of_every_role_and_form() -> None:
    assert turns(
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "d"},
            ],
        },
    ) == [Turn("system", "a"), Turn("user", "b"), Turn("assistant", "c\nd")]


def test_reasoning_text_and_calls_that_follow_each_other_are_one_turn() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
    }
    found = turns(
        {"role": "user", "content": "Hi"},
        reasoning,
        {"role": "assistant", "content": "I look."},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "8"}],
        },
        reasoning,
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    )
    calls = tuple(ToolCall(f"c{i}", "f", "{}", f"input[{i + 2}].arguments") for i in (1, 2))
    assert found == [
        Turn("user", "Hi"),
        Turn("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        Turn("tool", "7", tool_call_id="c1"),
        Turn("tool", "8", tool_call_id="c2"),
        Turn("assistant", "Done.", reasoning="hm"),
        Turn("assistant", "Really."),
    ]


def test_calls_without_text_have_no_content() -> None:
    [turn] = turns(CALL)
    assert turn.content is None
    assert [call.id for call in turn.tool_calls] == ["c1"]


def test_text_after_calls_is_another_turn() -> None:
    assert [turn.content for turn in turns(CALL, {"role": "assistant", "content": "a"})] == [
        None,
        "a",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("named", "f")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            },
            ToolChoice("required"),
        ),
    ],
)
def test_tools_and_their_choice(choice: Any, expected: ToolChoice) -> None:
    other = {"type": "function", "name": "g", "parameters": None, "strict": None}
    request = parse(
        tools=[TOOL, other], tool_choice=choice, parallel_tool_calls=False, max_tool_calls=3
    )
    options = request.to_conversation().tools
    assert options.choice == expected
    assert (options.parallel, options.max_calls) == (False, 3)
    allowed = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert [tool.name for tool in options.tools] == (["f"] if allowed else ["f", "g"])
    assert options.tools[0].strict
    repeated = json.loads("{" + request.repeated("m") + "}")
    assert [tool["name"] for tool in repeated["tools"]] == ["f", "g"]
    assert repeated["tool_choice"] == (choice or "auto")


def test_the_response_repeats_the_request() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    repeated = json.loads(
        "{"
        + parse(
            instructions="x",
            metadata={"a": "b"},
            max_output_tokens=5,
            temperature=0.5,
            store=False,
            text={"format": schema, "verbosity": "low"},
            prompt_cache_key="k",
            include=["reasoning.encrypted_content"],
        ).repeated("m")
        + "}"
    )
    assert repeated["text"] == {"format": schema}
    expected = {
        "model": "m",
        "instructions": "x",
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "temperature": 0.5,
        "store": False,
        "prompt_cache_key": "k",
        "background": False,
        "truncation": "disabled",
        "previous_response_id": None,
    }
    assert {name: repeated[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.words"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call", "id": "1"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{**CALL, "namespace": "x"}]}, "input[0].namespace"),
        ({"input": [{"role": "user", "content": "x"}] * 21}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": ""}, "tool_choice"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": {"a": float("inf")}}, "metadata.a"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "mode": "auto"}},
            "tool_choice.mode",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "name": "f",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            "tool_choice.name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.field == field
    assert field.partition("[")[0] in refused.value.message


def test_the_form_of_the_text() -> None:
    schema = {"type": "object"}
    wanted = parse(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
    ).wanted_output()
    assert wanted is not None
    assert json.loads(wanted.json_schema) == schema
    assert wanted.field_name == "text.format.schema"
    some_object = parse(text={"format": {"type": "json_object"}}).wanted_output()
    assert some_object is not None
    assert some_object.json_object
    for text in (None, {}, {"format": {"type": "text"}}):
        assert parse(text=text).wanted_output() is None


def test_hints_are_accepted_and_unknown_fields_named() -> None:
    body = {
        "input": [{"role": "user", "content": "x", "phase": "commentary", "mood": "good"}],
        "service_tier": "auto",
        "user": "u",
        "store": None,
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    request = validate(MODEL, json.dumps(body).encode())
    request.check()
    assert check_extras(request, False) == ("input[].mood",)
