"""Schemas and grammars with long compilations: fields of StructuredOutput by name."""

import json
from typing import Any


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def doubled(depth: int, keyword: str) -> Any:
    """References that stand for 2^depth schemas."""
    parts: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "string"}}}}
    for i in range(1, depth):
        reference = {"$ref": f"#/$defs/d{i - 1}"}
        parts[f"d{i}"] = {keyword: [reference, {"type": "array", "items": reference}]}
    return {"$defs": parts, "$ref": f"#/$defs/d{depth - 1}"}


HOSTILE: dict[str, dict[str, Any]] = {
    "a huge enum": {"json_schema": json.dumps({"enum": [f"v{i}-{i * i}" for i in range(4000)]})},
    "deep": {"json_schema": json.dumps(nested(100, {"type": "integer"}))},
    "many properties": {
        "json_schema": json.dumps({"properties": {f"p{i}": {} for i in range(1300)}})
    },
    "exponential references": {"json_schema": json.dumps(doubled(40, "anyOf"))},
    "exponential intersections": {"json_schema": json.dumps(doubled(40, "allOf"))},
    "a product of choices": {
        "json_schema": json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {"const": j}}} for j in range(4)]}
                    for i in range(9)
                ]
            }
        )
    },
    "a large state machine": {"regex": "(a|b)*a(a|b){24}"},
    "nested repetitions": {"regex": "((a{0,100}){0,100}){0,100}"},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" | s s s | ""\n'},
    "an intersection of expressions": {
        "grammar": "start: X\nX: /(.*a.*){9}/ & /(.*b.*){9}/ & ~/(.*c.*){9}/\n"
    },
    "long strings": {"json_schema": json.dumps({"type": "string", "minLength": 10**6})},
}
# llguidance would need 20 seconds, and none of its limits applies: a helper process ends it.
TAKES_LONG = {"json_schema": json.dumps({"type": "integer", "multipleOf": 999983})}
