"""Calls that a grammar enforces, by the embedded model, which was not trained on tools."""

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from support.processes.stack_process import RunningStack, running_stack

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def chats(stack: RunningStack) -> Any:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0).chat.completions


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_is_made_with_arguments_of_its_schema(chats: Any, choice: Any) -> None:
    for seed in range(4):
        answer = chats.create(
            model="pagewire-chat",
            messages=ASKED,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
        )
        [made] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        if made.function.name == "weather":
            jsonschema.validate(json.loads(made.function.arguments), PARAMETERS)
        else:
            assert (choice, json.loads(made.function.arguments)) == ("required", {})


def test_the_deltas_of_a_forced_call_add_up(chats: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0, "max_tokens": 200}
    whole = chats.create(model="pagewire-chat", messages=ASKED, **fields)
    [made] = whole.choices[0].message.tool_calls
    stream = chats.create(model="pagewire-chat", messages=ASKED, stream=True, **fields)
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
    assert parts[0].function.name == made.function.name == "weather"
    assert "".join(part.function.arguments for part in parts) == made.function.arguments


def test_a_call_that_a_stop_string_cuts_off_is_not_reported_as_a_call(chats: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0, "max_tokens": 200}
    given = {"model": "pagewire-chat", "messages": ASKED, "stop": ["city"], **fields}
    whole = chats.create(**given)
    assert whole.choices[0].finish_reason == "stop"
    *_, last = chats.create(stream=True, **given)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("parser", ["qwen3_coder", "mistral", "pythonic", "deepseek_v3"])
def test_calls_are_forced_in_the_format_of_the_model(parser: str) -> None:
    with running_stack("--tool-parser", parser) as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)
        for choice, tools in (("required", TOOLS), (NAMED, TOOLS)):
            fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "temperature": 0}
            fields["extra_body"] = {"max_tool_calls": 1}
            answer = client.chat.completions.create(
                model="pagewire-chat", messages=ASKED, max_tokens=300, **fields
            )
            [made] = answer.choices[0].message.tool_calls or ()
            assert made.type == "function"
            schema = PARAMETERS if made.function.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(made.function.arguments), schema)
            assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
                "tool_calls",
                None,
            )


def test_tools_of_a_model_without_a_format_are_refused(chats: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-parser"):
        chats.create(model="pagewire-chat", messages=ASKED, tools=TOOLS)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"minProperties": 2}, "has minProperties 2"),
        ({"properties": {"a": {"uniqueItems": True}}}, "has keywords .*: uniqueItems"),
    ],
)
def test_parameters_that_cannot_be_enforced_are_refused(
    stack: RunningStack, keywords: dict[str, Any], words: str
) -> None:
    bad = {"type": "object", **keywords}
    chat_tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": bad}}]
    responses_tools = [{"type": "function", **tool["function"]} for tool in chat_tools]
    messages_tools = [
        {"name": tool["name"], "input_schema": tool["parameters"]} for tool in responses_tools
    ]
    for path, field, required, body in (
        ("chat/completions", "tools[1].function.parameters", "required", {"tools": chat_tools}),
        ("responses", "tools[1].parameters", "required", {"tools": responses_tools}),
        ("messages", "tools[1].input_schema", {"type": "any"}, {"tools": messages_tools}),
    ):
        body |= {"input": ASKED} if path == "responses" else {"messages": ASKED}
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        given = {"model": "pagewire-chat", "tool_choice": required, limit: 9}
        answer = httpx.post(f"{stack.url}/v1/{path}", json={**given, **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert re.match(re.escape(field) + f" {words}", error["message"])
        if path != "messages":  # errors of Messages have no name of a field
            assert error["param"] == field
