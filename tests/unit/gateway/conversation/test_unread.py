"""Inputs that the model's chat template leaves out: named in the client's words, or refused."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser, Route, TextRoute

PLAIN = ("add_generation_prompt", "messages")
RICH = (
    *PLAIN,
    "enable_thinking",
    "messages[].name",
    "messages[].reasoning_content",
    "messages[].tool_calls",
    "messages[role=system]",
    "messages[role=tool]",
    "reasoning_effort",
    "tools",
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}
TURNS = [
    {"role": "developer", "content": "Be brief."},
    {**USER, "name": "Ada"},
    {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]
CHAT = {"messages": TURNS, "tools": TOOLS, "reasoning_effort": "low"}
CHAT_NAMES = (
    "tools",
    "messages[role=system]",
    "messages[role=tool]",
    "messages[].name",
    "messages[].tool_calls",
    "messages[].reasoning_content",
    "reasoning_effort",
)
RESPONSE = {
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"role": "system", "content": "Be brief."},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "reasoning": {"effort": "low"},
}
RESPONSE_NAMES = (
    "tools",
    "input[role=system]",
    "input[type=function_call_output]",
    "input[type=function_call]",
    "input[type=reasoning]",
    "reasoning.effort",
)
MESSAGE = {
    "max_tokens": 5,
    "system": "Be brief.",
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "output_config": {"effort": "low"},
}
MESSAGE_NAMES = (
    "tools",
    "system",
    "messages[].content[type=tool_result]",
    "messages[].content[type=tool_use]",
    "messages[].content[type=thinking]",
    "output_config.effort",
)


def ignored(
    route: Route | TextRoute,
    body: dict[str, Any],
    inputs: tuple[str, ...],
    strict: bool = False,
    reasoning_parser: str = "",
) -> tuple[str, ...]:
    parser = JobParser(BodyLimits(), strict)
    models = {"m": ServedModel(4096, "hermes", reasoning_parser, template_inputs=inputs)}
    data = json.dumps(body).encode()
    if route in ("tokenize", "count_tokens"):
        return parser.text_call(route, data, models).ignored  # type: ignore[arg-type]
    return parser.parse(route, data, models).ignored  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("route", "body", "names"),
    [
        ("chat", CHAT, CHAT_NAMES),
        ("tokenize", {"messages": TURNS, "tools": TOOLS}, CHAT_NAMES[:-1]),
        ("responses", RESPONSE, RESPONSE_NAMES),
        ("responses", {"input": "hi", "instructions": "Be brief."}, ("instructions",)),
        ("messages", MESSAGE, MESSAGE_NAMES),
        ("count_tokens", MESSAGE, MESSAGE_NAMES),
        ("chat", {"messages": [USER]}, ()),
        ("messages", {"max_tokens": 5, "messages": [USER]}, ()),
        ("chat", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}, ()),
    ],
)
def test_inputs_without_effect_are_named_in_the_clients_words(
    route: Route | TextRoute, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert ignored(route, body, PLAIN) == names
    assert ignored(route, body, RICH, strict=True) == ()
    assert ignored(route, body, (), strict=True) == (), "nothing is known of the template"
    for name in names[:1]:
        with pytest.raises(RequestError, match="is not rendered by this model's") as refused:
            ignored(route, body, PLAIN, strict=True)
        assert refused.value.field == name


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        {"response_format": {"type": "json_object"}},  # an answer in JSON, or a call
    ],
)
def test_tools_that_a_grammar_enforces_have_an_effect(fields: dict[str, Any]) -> None:
    body = {"messages": [USER], "tools": TOOLS, **fields}
    assert ignored("chat", body, PLAIN, strict=True) == ()


def test_variables_that_the_template_does_not_read_are_named() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "ä,b": 1}}
    assert ignored("chat", body, RICH) == ("chat_template_kwargs.%C3%A4%2Cb",)
    assert ignored("tokenize", body, PLAIN) == (
        "chat_template_kwargs.enable_thinking",
        "chat_template_kwargs.%C3%A4%2Cb",
    )
    many = {f"v{n}": n for n in range(100)}
    named = ignored("chat", {"messages": [USER], "chat_template_kwargs": many, "mood": 1}, PLAIN)
    assert named[:2] == ("mood", "chat_template_kwargs.v0")
    assert named[-1] == "and 85 more"


def test_effort_has_an_effect_where_it_turns_thinking_off() -> None:
    inputs = (*PLAIN, "enable_thinking")
    for effort, names in (("none", ()), ("low", ("reasoning_effort",))):
        body = {"messages": [USER], "reasoning_effort": effort}
        assert ignored("chat", body, inputs) == names


@pytest.mark.parametrize("route", ["messages", "count_tokens"])
@pytest.mark.parametrize(
    ("kind", "inputs", "names"),
    [
        ("enabled", PLAIN, ("thinking",)),
        ("adaptive", PLAIN, ("thinking",)),
        ("disabled", PLAIN, ()),
        ("enabled", (*PLAIN, "thinking"), ()),
    ],
)
def test_thinking_that_the_model_cannot_turn_on_is_named(
    route: Route | TextRoute, kind: str, inputs: tuple[str, ...], names: tuple[str, ...]
) -> None:
    body = {"max_tokens": 5, "messages": [USER], "thinking": {"type": kind}}
    assert ignored(route, body, inputs) == names
    assert ignored(route, body, inputs, reasoning_parser="think") == ()


def test_a_template_in_the_request_is_the_clients() -> None:
    assert ignored("chat", {**CHAT, "chat_template": "{{ tools }}"}, PLAIN, strict=True) == ()
