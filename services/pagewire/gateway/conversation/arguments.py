"""Parts of the grammars of a call's arguments: a tool's parameters, and JSON."""

import json
from dataclasses import dataclass
from typing import Any

from pagewire.gateway.conversation.tools import definition_of

# Models write JSON like this. With free white space, a model can repeat it up to its token limit.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A grammar repeats the definitions at each reference. Longer grammars would take long to write.
_MAX_REPEATED_BYTES = 16 << 10
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
)
_DEFINITIONS = ("$defs", "definitions")
_OBJECT_KEYWORDS = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a tool by name, and which are required.

    `any_name`: the schema names no parameter and allows all.
    """

    schemas: dict[str, Any]
    required: frozenset[str]
    definitions: dict[str, Any]
    any_name: bool

    @classmethod
    def of(cls, schema: dict[str, Any]) -> "Parameters | None":
        """The parameters of a schema; None if the schema has other keywords, or requires a name
        that it does not describe."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.keys() - _OBJECT_KEYWORDS - ANNOTATIONS or schema.get("type") != "object":
            return None
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        if not all(isinstance(each, dict) for each in properties.values()):
            return None
        if not properties.keys() >= set(required):
            return None
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        references = json.dumps(properties).count('"$ref"') if definitions else 0
        if references * len(json.dumps(definitions)) > _MAX_REPEATED_BYTES:
            return None
        allowed = schema.get("additionalProperties", True)
        if not properties and allowed not in (True, False, {}):
            return None
        any_name = not properties and allowed is not False
        return cls(properties, frozenset(required), definitions, any_name)

    def json_rule(self, schema: Any) -> str:
        """The JSON of a parameter, whose schema may refer to the definitions."""
        return json_rule({**schema, **self.definitions})

    def branches(self, schema: Any, nested: bool = False) -> list[dict[str, Any]] | None:
        """The alternatives of a parameter's schema, one type each; None if it is not simple."""
        for _ in range(4):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            if schema.keys() - ANNOTATIONS - {"$ref"}:
                return None
            schema = definition_of(schema, self.definitions)
        if not isinstance(schema, dict) or "$ref" in schema:
            return None
        if "anyOf" in schema:
            if (
                nested
                or schema.keys() - ANNOTATIONS - {"anyOf"}
                or not isinstance(schema["anyOf"], list)
            ):
                return None
            inner = [self.branches(each, nested=True) for each in schema["anyOf"]]
            return [branch for each in inner for branch in each or ()] if all(inner) else None
        if schema.keys() & {"allOf", "oneOf", "not", "if"}:
            return None
        if isinstance(kinds := schema.get("type"), list):
            return [{**schema, "type": kind} for kind in kinds]
        return [schema]


def json_rule(schema: dict[str, Any]) -> str:
    """A value as JSON, with blanks as models write them."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values of `enum` or `const`; None without these."""
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else None


def quoted(text: str) -> str:
    """The text as a terminal of Lark, whose strings have JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)
