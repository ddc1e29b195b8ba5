"""Answers of a real model with an enforced form: OpenAI's `parse`, schemas, required calls."""

import json
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import RunningStack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


class Animal(BaseModel):
    size: Literal["small", "large"]
    legs: Literal[2, 4]


def openai_client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)


def messages_client(stack: RunningStack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key="x", max_retries=0)


def test_responses_are_parsed(stack: RunningStack) -> None:
    response = openai_client(stack).responses.parse(
        model=EMBEDDED_NAME,
        input="Tell me about a fox.",
        text_format=Animal,
        max_output_tokens=200,
        temperature=0,
    )
    assert isinstance(response.output_parsed, Animal)


def test_a_json_object_and_a_stream_of_a_schema(stack: RunningStack) -> None:
    client = openai_client(stack)
    form: Any = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": EMBEDDED_NAME, "input": "A fox?", "temperature": 0}
    asked["max_output_tokens"] = 100
    with client.responses.stream(**asked, text={"format": form}) as stream:
        streamed = stream.get_final_response()
    whole = client.responses.create(**asked, text={"format": form})
    assert streamed.output_text == whole.output_text
    jsonschema.validate(json.loads(whole.output_text), SCHEMA)
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == "json_schema"


def test_messages_have_the_form_of_a_schema(stack: RunningStack) -> None:
    message = messages_client(stack).messages.create(
        model=EMBEDDED_NAME,
        max_tokens=100,
        messages=[{"role": "user", "content": "A fox?"}],
        extra_body={
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    )
    [block] = message.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)


def test_required_calls(stack: RunningStack) -> None:
    tool: Any = {"type": "function", "name": "note", "parameters": SCHEMA, "strict": True}
    response = openai_client(stack).responses.create(
        model=EMBEDDED_NAME,
        input="A fox?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=150,
    )
    [call] = response.output
    assert call.type == "function_call"
    assert call.name == "note"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    message = messages_client(stack).messages.create(
        model=EMBEDDED_NAME,
        max_tokens=150,
        messages=[{"role": "user", "content": "A fox?"}],
        tools=[{"name": "note", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "note"},
        extra_body={"temperature": 0},
    )
    [block] = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    assert message.stop_reason == "tool_use"


def test_responses_have_log_probabilities(stack: RunningStack) -> None:
    client = openai_client(stack)
    asked: dict[str, Any] = {"model": EMBEDDED_NAME, "input": "Hello!", "temperature": 0}
    asked |= {"max_output_tokens": 20, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked)
    chat = client.chat.completions.create(
        model=EMBEDDED_NAME,
        messages=[{"role": "user", "content": "Hello!"}],
        temperature=0,
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content or ()]
    [message] = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert [each.model_dump() for each in part.logprobs or ()] == expected
    assert whole.top_logprobs == 2
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) in (len(expected), len(expected) - 1)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done.logprobs] == [each["token"] for each in expected]
    tool: Any = {"type": "function", "name": "f", "parameters": None, "strict": False}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked, tools=[tool], tool_choice="required")
    assert refused.value.param == "include"


def test_a_schema_that_cannot_be_compiled_is_named(stack: RunningStack) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "wrong"}}}
    form: Any = {"type": "json_schema", "name": "n", "schema": bad}
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client(stack).responses.create(model=EMBEDDED_NAME, input="x", text={"format": form})
    assert refused.value.param == "text.format.schema"
