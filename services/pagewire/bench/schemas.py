"""JSON schemas drawn at random, as load for structured output."""

import random
import string
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "kind", "city", "price", "count", "tags", "notes", "parent", "état")
_MAX_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """An object schema of one to five properties, always the same for a seed.

    Every output is finite: strings and arrays have maximum lengths, and references do not recurse.
    """
    draw = random.Random(seed)
    schema = _object(draw, _MAX_DEPTH)
    if draw.random() < 0.2:
        schema["$defs"] = {"part": _object(draw, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def wide_schema(fields: int) -> Schema:
    """A schema of this number of required fields of usual types."""
    kinds: tuple[Schema, ...] = (
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
        {"enum": ["red", "green", "blue"]},
        {"type": "boolean"},
    )
    properties = {f"field_{i}": kinds[i % len(kinds)] for i in range(fields)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# At least fifty objects of ten fields: an output that does not end before its last token.
LISTS: Schema = {"type": "array", "items": wide_schema(10), "minItems": 50}


def _value(draw: random.Random, depth: int) -> Schema:
    simple: tuple[Callable[[random.Random], Schema], ...]
    simple = (_string, _integer, _number, _enum, _constant, _boolean, _null, _pattern, _format)
    if depth and draw.random() < 0.4:
        return draw.choice((_object, _array, _tuple, _any_of))(draw, depth - 1)
    return draw.choice(simple)(draw)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_NAMES, draw.randint(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _value(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.8],
        "additionalProperties": False,
    }
    if draw.random() < 0.2:
        schema["description"] = "an object"
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _value(draw, depth),
        "minItems": low,
        "maxItems": low + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    count = draw.randint(1, 3)
    return {
        "type": "array",
        "prefixItems": [_value(draw, depth) for _ in range(count)],
        "items": False,
        "minItems": count,
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(draw, depth) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random) -> Schema:
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 12)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 10_000)}
    if draw.random() < 0.2:
        schema["multipleOf"] = 1
    return schema


def _number(draw: random.Random) -> Schema:
    low = round(draw.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 500)}


def _enum(draw: random.Random) -> Schema:
    values = ["red", 'a "b"', 7, 2.5, None, True, "ü", [1, "x"], {"k": 1}]
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _constant(draw: random.Random) -> Schema:
    return {"const": draw.choice(("fixed", 3, None, False, {"a": [1]}))}


def _boolean(draw: random.Random) -> Schema:
    return {"type": "boolean"}


def _null(draw: random.Random) -> Schema:
    return {"type": ["null", "boolean"]}


def _pattern(draw: random.Random) -> Schema:
    letter = draw.choice(string.ascii_lowercase)
    patterns = (f"^{letter}[0-9]{{2,4}}$", "^(GET|PUT) /[a-z]{1,6}$", "^[A-Z][a-z]{0,8}$")
    return {"type": "string", "pattern": draw.choice(patterns)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(("date", "time", "uuid", "ipv4", "date-time"))}
