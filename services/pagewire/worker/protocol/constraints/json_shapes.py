"""What of a JSON schema decides how an output may go on from a place in it."""

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Keywords that do not change which values are valid.
_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$comment"))
_ROOT = frozenset(("x-guidance", "$defs", "definitions"))
_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_ARRAY = frozenset(("type", "items", "prefixItems", "minItems", "maxItems"))
_STRING = frozenset(("type", "minLength", "maxLength"))
# Patterns of white space alone: other characters could be taken for values.
_BLANK = r"(?:[ \n\r\t]|\\[nrts])"
_WHITESPACE = re.compile(rf"(?:{_BLANK}|[|()+*?]|\{{[0-9]+(?:,[0-9]*)?\}}|\[{_BLANK}*\])*")
_UNSPELLED = frozenset('"\\\x7f') | frozenset(map(chr, range(0x20)))


class Kind(Enum):
    """How a value is read."""

    OBJECT = 1
    ARRAY = 2
    STRING = 3  # of any characters, maybe with a bound
    NUMBER = 4  # without a bound
    OPAQUE = 5  # any other value: its text is known only as a whole


@dataclass(eq=False, slots=True)
class Shape:
    """A schema. What may follow a value of it does not depend on the value.

    That holds for any schema within objects and arrays of these keywords alone: they demand
    nothing of several values together.
    """

    kind: Kind = Kind.OPAQUE
    # Of an object: by name, as bytes of JSON. Names that are required only have `others`.
    properties: dict[bytes, "Shape"] = field(default_factory=dict)
    longest_name: int = 0  # bytes
    others: "Shape | None" = None  # of other properties; None: there are none
    prefix: list["Shape"] = field(default_factory=list)
    items: "Shape | None" = None  # behind `prefix`; None: there are none
    low: int = 0  # items, or characters of a string
    high: int | None = None

    def item(self, index: int) -> "Shape | None":
        """The shape of an item of an array."""
        return self.prefix[index] if index < len(self.prefix) else self.items

    def clipped(self, count: int) -> int:
        """A count of items or characters, as far as more of them change what may follow."""
        return count if self.high is not None else min(count, max(self.low, len(self.prefix)))


_ANY = Shape()


def shape_of(grammar: str) -> Shape | None:
    """The shape of the outputs of a grammar; None if they have none that helps."""
    try:
        (part,) = json.loads(grammar)["grammars"]
        schema = part["json_schema"]
        if not {key for key, value in part.items() if value is not None} <= {"name", "json_schema"}:
            return None
        whitespace = schema["x-guidance"]["whitespace_pattern"]
        if '"$id"' in json.dumps(schema):
            return None  # references may lead elsewhere
        root = _Reader(schema).read(schema)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if _WHITESPACE.fullmatch(whitespace) is None:
        return None
    return root if root.kind in (Kind.OBJECT, Kind.ARRAY) else None


class _Reader:
    """Reads the schemas of a document, each once, so that they may refer to themselves."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._read: dict[int, Shape] = {}

    def read(self, schema: Any) -> Shape:
        """The shape of a schema; that of any value if its keywords are not known here."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return _ANY
        if (found := self._read.get(id(schema))) is None:
            found = self._read[id(schema)] = Shape()
            keys = schema.keys() - _NOTES
            if schema is self._document:
                keys -= _ROOT
            kind = schema.get("type")
            if kind == "object" and keys <= _OBJECT:
                self._object(found, schema)
            elif kind == "array" and keys <= _ARRAY:
                self._array(found, schema)
            elif kind == "string" and keys <= _STRING:
                found.kind = Kind.STRING
                found.low, found.high = schema.get("minLength", 0), schema.get("maxLength")
            elif kind in ("number", "integer") and keys == {"type"}:
                found.kind = Kind.NUMBER
        return found

    def _object(self, shape: Shape, schema: dict[str, Any]) -> None:
        properties = schema.get("properties", {})
        names = {*properties, *schema.get("required", ())}
        if any(not _UNSPELLED.isdisjoint(name) for name in names):
            return  # it may be spelled in several ways
        shape.kind = Kind.OBJECT
        others = schema.get("additionalProperties", True)
        shape.others = None if others is False else self.read(others)
        for name in names:
            inner = properties.get(name, others)
            shape.properties[name.encode()] = self.read(inner)
        shape.longest_name = max(map(len, shape.properties), default=0)

    def _array(self, shape: Shape, schema: dict[str, Any]) -> None:
        shape.kind = Kind.ARRAY
        shape.prefix = [self.read(each) for each in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        shape.items = None if items is False else self.read(items)
        shape.low, shape.high = schema.get("minItems", 0), schema.get("maxItems")

    def _resolved(self, schema: Any) -> Any:
        """What a schema refers to within the document; the schema itself if it is no reference."""
        for _ in range(16):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            path = schema["$ref"]
            if schema.keys() - _NOTES - {"$ref"} or not path.startswith("#/") or "%" in path:
                return None
            schema = self._document
            for part in path[2:].split("/"):
                if "~" in part or not isinstance(schema, dict):
                    return None
                schema = schema.get(part)
        return None
