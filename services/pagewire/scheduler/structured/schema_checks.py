"""Checks of JSON schemas before they are compiled: size, and what llguidance does not enforce."""

import json
from typing import Any

from pagewire.errors import RequestError, invalid
from pagewire.grammars.dates import schemas_in


def check_json(text: str, field: str, max_nodes: int) -> None:
    """RequestError for text that is not JSON, and for a schema that `check_schema` refuses."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{field} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(field, f"{field} is not a JSON object; give a schema as an object")
    check_schema(value, field, max_nodes)


def check_schema(value: Any, field: str, max_nodes: int) -> None:
    """RequestError for a schema that has too many values, or that is not enforced.

    llguidance counts pairs for `minProperties`, and an output may have a pair twice.
    """
    nodes = _count(value)
    if nodes > max_nodes:
        raise too_many(field, nodes, max_nodes)
    for schema in schemas_in(value):
        _check_min_properties(schema, field)


def too_many(field: str, nodes: int, max_nodes: int) -> RequestError:
    """The error of a grammar that has too many values."""
    return invalid(
        field,
        f"{field} has {nodes} values; at most {max_nodes} are allowed (max_grammar_nodes)",
    )


def _check_min_properties(schema: dict[str, Any], field: str) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    given = required if isinstance(required, list) else []
    names = {name for name in given if isinstance(name, str)}
    if not isinstance(least, int) or least <= max(1, len(names)):
        return
    raise invalid(
        field,
        f"{field} has minProperties {least}, which is not supported; list required names instead",
    )


def _count(value: object) -> int:
    """Values in a JSON value, itself included."""
    count, waiting = 0, [value]
    while waiting:
        found = waiting.pop()
        count += 1
        if isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)
    return count
