"""Checks of JSON schemas before they are compiled: size, and what llguidance does not enforce."""

import json
from collections.abc import Iterator
from typing import Any

from pagewire.errors import RequestError, invalid
from pagewire.grammars.dates import schemas_in

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_INT64 = 1 << 63


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

    llguidance counts pairs for `minProperties`, and an output may have a pair twice. It rounds
    numbers to double precision, and bounds of integers to the range of 64 bits.
    """
    nodes = _count(value)
    if nodes > max_nodes:
        raise too_many(field, nodes, max_nodes)
    for schema in schemas_in(value):
        _check_min_properties(schema, field)
        _check_numbers(schema, field)


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


def _check_numbers(schema: dict[str, Any], field: str) -> None:
    """RequestError for numbers that llguidance would change."""
    for key in ("const", "enum", *_LOWER, *_UPPER, "multipleOf"):
        for number in _values(schema.get(key)):
            if isinstance(number, int | float) and not _is_enforced(key, number):
                raise invalid(
                    field,
                    f"{field} has {key} {str(number)[:40]}, a number too large to be enforced "
                    "exactly; use one within -2^53 to 2^53, or a string",
                )


def _is_enforced(key: str, number: float) -> bool:
    """Whether no output breaks a rule because llguidance changes its number."""
    if (key in _LOWER and number >= _INT64) or (key in _UPPER and number <= -_INT64):
        return False
    if key == "maximum" and number == _INT64 - 1:
        return True  # rounded up to 2^63, then down to the range of 64 bits
    try:
        return float(number) == number
    except OverflowError:
        return False


def _count(value: object) -> int:
    """Values in a JSON value, itself included."""
    return sum(1 for _ in _values(value))


def _values(value: object) -> Iterator[object]:
    """A JSON value and all values in it."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)
