"""Arguments in formats other than JSON: texts that a grammar allows are valid and read exactly."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from pagewire.gateway.conversation.conversation import Conversation
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolOptions
from pagewire.gateway.conversation.turns import Turn
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsers.events import CallArguments
from pagewire.scheduler.structured.grammars import grammar_text

BYTES = llguidance.LLTokenizer("byte")
STRING = {"type": "string"}


def parameters(**schemas: Any) -> dict[str, Any]:
    required = [name for name in schemas if not name.startswith("may")]
    return {"type": "object", "properties": schemas, "required": required}


def chat(schema: dict[str, Any]) -> Conversation:
    tools = ToolOptions((Tool("f", parameters=schema),), ToolChoice("named", "f"))
    return Conversation([Turn("user", "x")], tools)


def written(parser: str, arguments: str) -> str:
    """A call with the text of its arguments."""
    if parser == "pythonic":
        return f"[f({arguments})]"
    return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"


def read(parser: str, schema: dict[str, Any], text: str) -> Any:
    """The arguments that the parser reads."""
    form = chat(schema).output_format(ServedModel(100, parser))
    assert form is not None
    assert form.tools == parser, "the grammar is in the model's own format"
    reader = form.parser()
    events = reader.feed(text) + reader.finish()
    return json.loads("".join(each.json for each in events if isinstance(each, CallArguments)))


def matcher(parser: str, schema: dict[str, Any]) -> llguidance.LLMatcher:
    constraint = chat(schema).constraint(ServedModel(100, parser))
    assert constraint is not None
    made = llguidance.LLMatcher(BYTES, grammar_text(constraint, BYTES), log_level=0)
    assert not made.get_error()
    return made


def accepts(parser: str, schema: dict[str, Any], text: str) -> bool:
    made, data = matcher(parser, schema), list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def tagged(**values: str) -> str:
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())


COLOR = {"$defs": {"Color": {"type": "string", "enum": ["red", "5"]}}}
# A schema, a text of arguments that it allows, their values, and a text that it does not allow.
TAGGED: list[tuple[dict[str, Any], str, Any, str]] = [
    (parameters(a=STRING), tagged(a="Kö\n<b>ln"), {"a": "Kö\n<b>ln"}, tagged(b="x")),
    (parameters(a=STRING), tagged(a="5"), {"a": "5"}, tagged(a="5</parameter>")),
    (parameters(a={**STRING, "maxLength": 3}), tagged(a="Köl"), {"a": "Köl"}, tagged(a="Köln")),
    (parameters(a={"enum": ["x", "/y"]}), tagged(a="/y"), {"a": "/y"}, tagged(a="z")),
    (parameters(a={"enum": [1, None, "x"]}), tagged(a="null"), {"a": None}, tagged(a="2")),
    (parameters(a={"type": "integer"}), tagged(a="5"), {"a": 5}, tagged(a='"5"')),
    (parameters(a={"type": ["string", "null"]}), tagged(a="5"), {"a": "5"}, tagged(a="x") * 2),
    (
        parameters(a={"anyOf": [STRING, {"type": "null"}], "default": None}),
        tagged(a="null"),
        {"a": None},
        "",
    ),
    (parameters(a=STRING, may_b={"type": "boolean"}), tagged(a="x"), {"a": "x"}, ""),
    (
        parameters(may_a=STRING, b={"type": "array", "items": {"type": "integer"}}),
        tagged(b="[1, 2]"),
        {"b": [1, 2]},
        tagged(b="[1, true]"),
    ),
    (
        {**parameters(a={"$ref": "#/$defs/Color"}), **COLOR},
        tagged(a="5"),
        {"a": "5"},
        tagged(a="blue"),
    ),
    (parameters(a={}), tagged(a='{"x": [1]}'), {"a": {"x": [1]}}, tagged(b="x")),
    ({"type": "object"}, tagged(x="1", y="z"), {"x": "1", "y": "z"}, "x"),
]
PYTHON: list[tuple[dict[str, Any], str, Any, str]] = [
    (parameters(a=STRING), 'a="Kö\\"ln"', {"a": 'Kö"ln'}, "a=x"),
    (parameters(a={"type": "boolean"}), "a=True", {"a": True}, "a=true"),
    (parameters(a={"anyOf": [STRING, {"type": "null"}]}), "a=None", {"a": None}, "a=null"),
    (parameters(a={"enum": ["x", 1, False]}), "a=False", {"a": False}, 'a="y"'),
    (parameters(a=STRING, may_b=STRING), 'a="x"', {"a": "x"}, 'b="x"'),
    (parameters(a=STRING, may_b=STRING), 'a="x", may_b="y"', {"a": "x", "may_b": "y"}, 'a="x", '),
    (parameters(may_a=STRING, may_b={"type": "number"}), "may_b=1.5", {"may_b": 1.5}, ", may_b=1"),
    (parameters(may_a=STRING), "", {}, "a="),
    ({**parameters(a={"$ref": "#/$defs/Color"}), **COLOR}, 'a="5"', {"a": "5"}, "a=5"),
    (parameters(a={"type": "array", "items": STRING}), 'a=["x"]', {"a": ["x"]}, "a=[1]"),
    ({"type": "object"}, 'x=1, y="z"', {"x": 1, "y": "z"}, "1=x"),
]
CASES = [("qwen3_coder", *case) for case in TAGGED] + [("pythonic", *case) for case in PYTHON]


@pytest.mark.parametrize(("parser", "schema", "good", "value", "bad"), CASES)
def test_arguments(parser: str, schema: dict[str, Any], good: str, value: Any, bad: str) -> None:
    text = written(parser, good)
    assert accepts(parser, schema, text)
    assert not accepts(parser, schema, written(parser, bad))
    assert read(parser, schema, text) == value
    jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    ("parser", "schema"),
    [
        ("qwen3_coder", parameters(a={**STRING, "pattern": "^x"})),
        ("qwen3_coder", parameters(a={"type": ["string", "integer"]})),
        ("qwen3_coder", parameters(a={"enum": ["5", 5]})),
        ("qwen3_coder", parameters(a={"enum": ["</parameter>"]})),
        ("qwen3_coder", parameters(a={"oneOf": [STRING, {"type": "null"}]})),
        ("qwen3_coder", parameters(**{"a>b": STRING})),
        ("qwen3_coder", {**parameters(a=STRING), "minProperties": 1}),
        ("qwen3_coder", {**parameters(), "required": ["a"]}),
        (
            "qwen3_coder",
            {
                **parameters(a={"$ref": "#/$defs/A"}),
                "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}},
            },
        ),
        # Definitions that would be repeated too often.
        (
            "qwen3_coder",
            {
                **parameters(**{f"p{i}": {"$ref": "#/$defs/Color"} for i in range(99)}),
                "$defs": {"Color": {"type": "string", "enum": [f"c{i}" for i in range(99)]}},
            },
        ),
        ("pythonic", {"anyOf": [parameters(a=STRING)]}),
        ("pythonic", parameters(**{"a-b": STRING})),
        ("pythonic", {"type": "object", "additionalProperties": STRING}),
    ],
)
def test_other_schemas_are_enforced_as_json(parser: str, schema: dict[str, Any]) -> None:
    form = chat(schema).output_format(ServedModel(100, parser))
    assert form is not None
    assert form.tools == "json"


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize("seed", range(40))
def test_what_a_grammar_lets_through_is_valid(parser: str, seed: int) -> None:
    """Draws bytes that the grammar allows, and checks the parser's result."""
    draw = random.Random(seed)
    kinds: list[Any] = [
        {**STRING, "maxLength": 6},
        {"enum": ["ab", "c d"]},
        {"type": "boolean"},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"anyOf": [{**STRING, "maxLength": 4}, {"type": "null"}]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        {"enum": [1, 2]},
    ]
    names = [f"{draw.choice(['may_', ''])}p{i}" for i in range(draw.randint(0, 4))]
    schema = parameters(**{name: draw.choice(kinds) for name in names})
    schema["additionalProperties"] = False
    made = matcher(parser, schema)
    text = bytearray()
    while not made.is_stopped() and len(text) < 2000:
        mask = made.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        printable = [each for each in allowed if 32 <= each < 127] or allowed
        if not allowed:
            break
        token = draw.choice(printable)
        assert made.consume_token(token)
        text.append(token)
    assert made.is_accepting()
    jsonschema.validate(read(parser, schema, text.decode()), schema)
