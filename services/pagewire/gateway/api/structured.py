"""The fields that constrain an output: OpenAI's, vLLM's and vLLM's older ones.

They become one StructuredOutput. Schedulers compile it and report errors in the schema itself.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Discriminator, Field, JsonValue, Tag
from pydantic_core import to_json

from pagewire.errors import RequestError, invalid, quoted
from pagewire.gateway.api.strict import Strict
from pagewire.gateway.api.unsupported import Neutral
from pagewire.limits import MAX_GRAMMAR_BYTES
from pagewire.v1 import inference_pb2 as pb

# vLLM's names of engines. The output does not depend on the engine, so ours serves all names.
_BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
_FORMATS = "text, json_object, json_schema or structural_tag"
# Options of vLLM's `structured_outputs` for other engines; false changes nothing.
_OPTIONS: Neutral = {
    "disable_fallback": (False, True),  # there is no other engine to fall back to
    "disable_additional_properties": (False,),
}

# The newer form of structural tags.
_TAG_FORMS: Neutral = {"format": ()}


def _schema_tag(value: Any) -> str | None:
    if isinstance(value, dict):
        return "<object>"
    return "<text>" if isinstance(value, str) else None


Schema = Annotated[
    Annotated[dict[str, JsonValue], Tag("<object>")] | Annotated[str, Tag("<text>")],
    Discriminator(
        _schema_tag,
        custom_error_type="schema",
        custom_error_message="it must be an object, or an object's JSON as a string",
    ),
]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_GRAMMAR_BYTES)]


class JsonSchema(Strict):
    """The schema of `response_format`. The output always matches it, with or without `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's field; `structural_tag` is vLLM's."""

    refused = _TAG_FORMS

    type: str
    json_schema: JsonSchema | None = None
    # For a structural tag in vLLM's older form.
    structures: list[JsonValue] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Strict):
    """vLLM's field: one kind, and options."""

    refused = _OPTIONS

    # vLLM's name is `json`, which pydantic uses itself.
    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(Strict):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    def wanted_output(self) -> pb.StructuredOutput | None:
        """See `structured_output`. An endpoint with another field for the output overrides this."""
        return structured_output(self)


def structured_output(fields: StructuredFields) -> pb.StructuredOutput | None:
    """The constraint on the output from `fields` alone; None allows any text.

    RequestError if two fields are set, or if one is not valid.
    """
    found = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    _check_backend(fields.guided_decoding_backend)
    if len(found) > 1:
        first, second = (output.field_name for output in found[:2])
        raise invalid(second, f"{second} cannot be combined with {first}; give one of them")
    if not found:
        if fields.guided_whitespace_pattern is not None:
            raise _needs_json("guided_whitespace_pattern")
        return None
    (output,) = found
    if (pattern := fields.guided_whitespace_pattern) is not None:
        if output.whitespace_pattern:
            raise invalid(
                "guided_whitespace_pattern",
                "guided_whitespace_pattern and structured_outputs.whitespace_pattern differ; give "
                "one of them",
            )
        if output.WhichOneof("kind") not in _JSON_KINDS:
            raise _needs_json("guided_whitespace_pattern")
        output.whitespace_pattern = pattern
    return _bounded(output)


def _bounded(output: pb.StructuredOutput) -> pb.StructuredOutput:
    size = output.ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        field = output.field_name
        raise invalid(
            field, f"{field} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed; shorten it"
        )
    return output


def json_output(
    fields: StructuredFields, field: str, schema: dict[str, JsonValue] | None
) -> pb.StructuredOutput:
    """The constraint from a `field` of another API: JSON, with a schema if there is one.

    RequestError if the request has another constraint too, or if the schema is too large.
    """
    if (other := structured_output(fields)) is not None:
        name = other.field_name
        raise invalid(name, f"{name} cannot be combined with {field}; give one of them")
    if schema is None:
        return pb.StructuredOutput(json_object=True, field_name=field)
    return _bounded(pb.StructuredOutput(json_schema=_json(schema), field_name=f"{field}.schema"))


_JSON_KINDS = ("json_schema", "json_object", "structural_tag")
# No white space between the tokens of JSON.
_NO_WHITESPACE = "[ ]{0}"


def _response_format(fields: StructuredFields) -> list[pb.StructuredOutput]:
    asked = fields.response_format
    if asked is None:
        return []
    field = "response_format"
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise invalid(f"{field}.json_schema", f"{field}.json_schema needs type json_schema")
    if asked.type != "structural_tag" and (asked.structures or asked.triggers):
        raise invalid(f"{field}.structures", f"{field}.structures needs type structural_tag")
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        return [pb.StructuredOutput(json_object=True, field_name=field)]
    if asked.type == "structural_tag":
        tag = {"structures": asked.structures, "triggers": asked.triggers}
        return [pb.StructuredOutput(structural_tag=_json(tag), field_name=field)]
    if asked.type != "json_schema":
        raise invalid(
            f"{field}.type", f"{field}.type is {quoted(asked.type)}; it must be {_FORMATS}"
        )
    field = "response_format.json_schema"
    if asked.json_schema is None:
        raise invalid(field, f"{field} is required with type json_schema")
    if asked.json_schema.schema_ is None:
        raise invalid(f"{field}.schema", f"{field}.schema is required")
    schema = _json(asked.json_schema.schema_)
    return [pb.StructuredOutput(json_schema=schema, field_name=f"{field}.schema")]


def _structured_outputs(fields: StructuredFields) -> list[pb.StructuredOutput]:
    asked = fields.structured_outputs
    if asked is None:
        return []
    name = "structured_outputs"
    found = _kinds(
        {
            f"{name}.json": asked.json_,
            f"{name}.json_object": asked.json_object or None,
            f"{name}.regex": asked.regex,
            f"{name}.choice": asked.choice,
            f"{name}.grammar": asked.grammar,
            f"{name}.structural_tag": asked.structural_tag,
        }
    )
    if not found:
        raise invalid(
            name,
            f"{name} is empty; give json, json_object, regex, choice, grammar or structural_tag",
        )
    pattern = asked.whitespace_pattern
    if asked.disable_any_whitespace:
        if pattern is not None:
            raise invalid(
                f"{name}.whitespace_pattern",
                f"{name}.whitespace_pattern cannot be combined with disable_any_whitespace",
            )
        pattern = _NO_WHITESPACE
    if pattern is not None:
        for output in found:
            if output.WhichOneof("kind") not in _JSON_KINDS:
                raise _needs_json(f"{name}.whitespace_pattern")
            output.whitespace_pattern = pattern
    return found


def _guided(fields: StructuredFields) -> list[pb.StructuredOutput]:
    return _kinds(
        {
            "guided_json": fields.guided_json,
            "guided_regex": fields.guided_regex,
            "guided_choice": fields.guided_choice,
            "guided_grammar": fields.guided_grammar,
        }
    )


def _kinds(values: dict[str, Any]) -> list[pb.StructuredOutput]:
    """A StructuredOutput for each value that is given, by the last part of its name."""
    return [_KINDS[_kind(name)](name, value) for name, value in values.items() if value is not None]


def _kind(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("guided_")


def _json_output(name: str, value: Any) -> pb.StructuredOutput:
    text = value if isinstance(value, str) else _json(value)
    return pb.StructuredOutput(json_schema=text, field_name=name)


def _choice_output(name: str, value: list[str]) -> pb.StructuredOutput:
    if not value or not all(value):
        raise invalid(name, f"{name} must have texts, none of them empty")
    return pb.StructuredOutput(choice=pb.Choices(values=value), field_name=name)


def _text_output(kind: str) -> Callable[[str, Any], pb.StructuredOutput]:
    def convert(name: str, value: Any) -> pb.StructuredOutput:
        text = value if isinstance(value, str) else _json(value)
        if not text:
            raise invalid(name, f"{name} is empty; remove it")
        output = pb.StructuredOutput(field_name=name)
        setattr(output, kind, text)
        return output

    return convert


_KINDS: dict[str, Callable[[str, Any], pb.StructuredOutput]] = {
    "json": _json_output,
    "json_object": lambda name, _: pb.StructuredOutput(json_object=True, field_name=name),
    "regex": _text_output("regex"),
    "choice": _choice_output,
    "grammar": _text_output("grammar"),
    "structural_tag": _text_output("structural_tag"),
}


def _json(value: Any) -> str:
    """JSON text; keys stay in the order in which the output will have them."""
    return to_json(value).decode()


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend.partition(":")[0] not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise invalid(
            "guided_decoding_backend",
            f"guided_decoding_backend is {quoted(backend)}; it must be one of {known}",
        )


def _needs_json(field: str) -> RequestError:
    return invalid(field, f"{field} needs a JSON schema or json_object; remove it")
