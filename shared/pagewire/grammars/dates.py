"""Dates in JSON schemas.

llguidance's `date` and `date-time` allow the year 0000, and 29 February in every year. A pattern
excludes these; llguidance matches it together with the format.
"""

from typing import Any

# Keywords whose values are not schemas.
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
# Keywords whose values map names that a client chooses to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_QUADRUPLE = "(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, ... 96
_LEAP_YEAR = f"(?:[0-9]{{2}}{_QUADRUPLE}|{_QUADRUPLE}00)"
DATE = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2])|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"


def with_real_dates(schema: Any) -> bool:
    """Adds the pattern to all schemas in a JSON value that have such a format.

    Returns whether there are any.
    """
    dated = [each for each in schemas_in(schema) if each.get("format") in ("date", "date-time")]
    for each in dated:
        if "pattern" not in each:
            each["pattern"] = DATE
        elif isinstance(each.get("allOf", []), list):
            each["allOf"] = [*each.get("allOf", []), {"pattern": DATE}]
    return bool(dated)


def schemas_in(value: Any) -> list[dict[str, Any]]:
    """All objects of a JSON value that may be schemas."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, dict):
            found.append(each)
            for key, inner in each.items():
                if key in _NAMED and isinstance(inner, dict):
                    waiting.extend(inner.values())
                elif key not in _VALUES:
                    waiting.append(inner)
    return found
