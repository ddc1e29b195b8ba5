"""Structured output over HTTP and gRPC, with the embedded model."""

import json
import re
from typing import Any, Literal

import grpc
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def ask(stack: RunningStack, **fields: Any) -> tuple[str, str]:
    """The text and the finish reason of an answer."""
    answer = post(stack, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def post(stack: RunningStack, **fields: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "Tell me about a person."}],
        "max_tokens": 200,
        "seed": 3,
        **fields,
    }
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_json_schema(stack: RunningStack, temperature: float) -> None:
    text, reason = ask(stack, response_format=JSON_SCHEMA, temperature=temperature)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    assert list(json.loads(text)) == list(SCHEMA["properties"])


def test_the_openai_client_parses(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)
        mood: Literal["good", "bad"]

    answer = client.chat.completions.parse(
        model="pagewire-chat",
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format=Person,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2,9}"}}, "[0-9]{3}-[a-z]{2,9}"),
        ({"guided_regex": "[0-9]{3}-[a-z]{2,9}"}, "[0-9]{3}-[a-z]{2,9}"),
        ({"guided_choice": ["yes", "no", 'mäy"\\be']}, 'yes|no|mäy"\\\\be'),
        ({"guided_grammar": 'root ::= "x" [0-9] | "yy"'}, "x[0-9]|yy"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
    ],
)
def test_other_kinds(stack: RunningStack, fields: dict[str, Any], pattern: str) -> None:
    text, reason = ask(stack, **fields)
    assert reason == "stop"
    assert re.fullmatch(pattern, text)


def test_any_object_and_a_cut(stack: RunningStack) -> None:
    text, reason = ask(stack, response_format={"type": "json_object"}, max_tokens=5)
    assert text.startswith("{")
    assert reason == "length"


def test_a_structural_tag(stack: RunningStack) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f"],
    }
    bias = {"31": 100}  # "<"
    text, _ = ask(stack, structured_outputs={"structural_tag": tag}, logit_bias=bias, max_tokens=90)
    if found := re.search("<f>(.*?)</f>", text, re.DOTALL):
        jsonschema.validate(json.loads(found[1]), SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"min_tokens": 150},
        {"ignore_eos": True},
        {"logit_bias": {"2": 100, "1": 100}},
        {"top_k": 3, "top_p": 0.5},
    ],
)
def test_combinations(stack: RunningStack, fields: dict[str, Any]) -> None:
    answer = post(stack, response_format=JSON_SCHEMA, **fields)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == fields.get("n", 1)
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_stop_string_ends_the_output_early(stack: RunningStack) -> None:
    text, reason = ask(stack, response_format=JSON_SCHEMA, stop=['"age"'])
    assert reason == "stop"
    assert text.rstrip().endswith(",")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
        ({"guided_grammar": "start: undefined_rule"}, "guided_grammar", "undefined_rule"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": {"enum": list(range(5000))}}, "guided_json", "max_grammar_nodes"),
        ({"guided_json": {"multipleOf": 999983}}, "guided_json", "max_grammar_seconds"),
    ],
)
def test_refusals_name_the_field_and_the_reason(
    stack: RunningStack, fields: dict[str, Any], field: str, words: str
) -> None:
    answer = post(stack, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert words in answer.json()["error"]["message"]


def test_grpc(stub: inference_pb2_grpc.InferenceStub) -> None:
    request = pb.GenerateRequest(
        prompt="A person:",
        stop=pb.StopConditions(max_tokens=200),
        sampling=pb.SamplingParams(seed=1),
        structured_output=pb.StructuredOutput(json_schema=json.dumps(SCHEMA)),
    )
    text = "".join(response.text for response in stub.Generate(request))
    jsonschema.validate(json.loads(text), SCHEMA)


def test_resumed_tokens_that_contradict_the_grammar_are_refused(
    stack: RunningStack, stub: inference_pb2_grpc.InferenceStub
) -> None:
    request = pb.GenerateRequest(
        prompt="A number:",
        stop=pb.StopConditions(max_tokens=20),
        structured_output=pb.StructuredOutput(regex="[0-9]{9}"),
        resume_token_ids=tokens(stack, "x"),
    )
    with pytest.raises(grpc.RpcError, match="resume_token_ids: the grammar does not") as raised:
        list(stub.Generate(request))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("pagewire-error-field", "resume_token_ids") in raised.value.trailing_metadata()
    del request.resume_token_ids[:]
    request.resume_token_ids.extend(tokens(stack, "12"))
    text = "".join(response.text for response in stub.Generate(request))
    assert re.fullmatch("[0-9]{7}", text)


def test_allowed_tokens_and_bad_words(stack: RunningStack) -> None:
    digits = [str(each) for each in range(10)]
    ids = [tokens(stack, each)[0] for each in digits]
    text, reason = ask(stack, allowed_token_ids=ids, max_tokens=20)
    assert set(text) <= set(digits)
    assert reason == "length"
    free, _ = ask(stack, temperature=0, max_tokens=40)
    first, second = free.split()[:2]
    banned, _ = ask(stack, temperature=0, max_tokens=40, bad_words=[f"{first} {second}"])
    assert not banned.startswith(f"{first} {second}")
    assert ask(stack, temperature=0, max_tokens=40, bad_words=["zebra crossing"])[0] == free


def tokens(stack: RunningStack, text: str) -> list[int]:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        request = pb.TokenizeRequest(text=text)
        return list(inference_pb2_grpc.InferenceStub(channel).Tokenize(request).token_ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
    ],
)
def test_lists_that_are_refused(stack: RunningStack, fields: dict[str, Any], field: str) -> None:
    answer = post(stack, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_fields_that_exclude_every_token(stack: RunningStack) -> None:
    four = tokens(stack, "4")
    for fields, named in (
        ({"allowed_token_ids": four, "ignore_eos": True}, "allowed_token_ids and bad_words"),
        ({"guided_regex": "4"}, "bad_words and guided_regex"),
        (
            {"guided_regex": "4", "bad_words": None, "stop_token_ids": four, "min_tokens": 1},
            "guided_regex and min_tokens",
        ),
    ):
        answer = post(stack, **{"bad_words": ["4"], **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == named.split()[0]
        assert f"{named} exclude all" in error["message"]


def test_a_beam_search_is_refused(stack: RunningStack) -> None:
    body = {"prompt": "x", "use_beam_search": True, "best_of": 2, "temperature": 0}
    answer = httpx.post(f"{stack.url}/v1/completions", json={**body, "guided_regex": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"
