"""The fields that constrain an output, and the one message made of them."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.chat import ChatRequest
from pagewire.gateway.api.structured import structured_output
from pagewire.v1 import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def output(**fields: Any) -> pb.StructuredOutput | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return structured_output(ChatRequest.model_validate_json(json.dumps(body)))


def in_format(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def in_vllm(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "name"),
    [
        (in_format("json_object"), "json_object", True, "response_format"),
        (
            in_format("json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": True}),
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        (in_format("structural_tag", **TAG), "structural_tag", TAG, "response_format"),
        (in_vllm(json=SCHEMA), "json_schema", SCHEMA, "structured_outputs.json"),
        (in_vllm(json=json.dumps(SCHEMA)), "json_schema", SCHEMA, "structured_outputs.json"),
        (in_vllm(json_object=True), "json_object", True, "structured_outputs.json_object"),
        (in_vllm(regex="a+"), "regex", "a+", "structured_outputs.regex"),
        (in_vllm(choice=["a", "b"]), "choice", ["a", "b"], "structured_outputs.choice"),
        (in_vllm(grammar="start: A"), "grammar", "start: A", "structured_outputs.grammar"),
        (in_vllm(structural_tag=TAG), "structural_tag", TAG, "structured_outputs.structural_tag"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "start: A"}, "grammar", "start: A", "guided_grammar"),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"},
            "json_schema",
            SCHEMA,
            "guided_json",
        ),
    ],
)
def test_each_field_becomes_one_message(
    fields: dict[str, Any], kind: str, value: Any, name: str
) -> None:
    found = output(**fields)
    assert found is not None
    assert found.WhichOneof("kind") == kind
    assert found.field_name == name
    given = getattr(found, kind)
    if kind == "choice":
        assert list(given.values) == value
    elif isinstance(value, dict):
        assert json.loads(given) == value
        assert list(json.loads(given)) == list(value)  # keys keep their order
    else:
        assert given == value


def test_white_space() -> None:
    for fields in (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        in_vllm(json=SCHEMA, whitespace_pattern=" ?"),
    ):
        assert output(**fields).whitespace_pattern == " ?"
    assert output(**in_vllm(json=SCHEMA, disable_any_whitespace=True)).whitespace_pattern


@pytest.mark.parametrize("fields", [{}, in_format("text"), {"guided_json": None}])
def test_any_text(fields: dict[str, Any]) -> None:
    assert output(**fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (in_format("xml"), "response_format.type"),
        (in_format("json_schema"), "response_format.json_schema"),
        (in_format("json_schema", json_schema={"name": "x"}), "response_format.json_schema.schema"),
        (in_format("text", json_schema={"schema": {}}), "response_format.json_schema"),
        (in_format("json_object", **TAG), "response_format.structures"),
        (in_vllm(), "structured_outputs"),
        (in_vllm(json_object=False), "structured_outputs"),
        (in_vllm(json=SCHEMA, regex="a"), "structured_outputs.regex"),
        (in_vllm(regex=""), "structured_outputs.regex"),
        (in_vllm(choice=[]), "structured_outputs.choice"),
        (in_vllm(choice=["a", ""]), "structured_outputs.choice"),
        (in_vllm(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
        (
            in_vllm(json=SCHEMA, whitespace_pattern=" ", disable_any_whitespace=True),
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", **in_format("json_object")}, "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "mine"}, "guided_decoding_backend"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        output(**fields)
    assert refused.value.field == field
    assert field in refused.value.message
