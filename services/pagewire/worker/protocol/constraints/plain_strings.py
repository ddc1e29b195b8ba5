"""Finds JSON grammars whose strings allow all plain characters, up to their length."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pagewire.grammars.dates import DATE, schemas_in

# Numbers, formats, white space and JSON itself have none of these.
_PROBES = "~^`@%#;&!<>=_/$"
_FORMATS = frozenset(("date-time", "time", "date", "duration", "hostname", "ipv4", "ipv6", "uuid"))
_WHITESPACE = re.compile(r"(?:[ \n\r\t\[\]{}()|+*?,0-9]|\\[nrts])*")
_OPTIONS = frozenset(("whitespace_pattern", "lenient", "coerce_one_of"))


def probe_of(grammar: str) -> str | None:
    """The probe, a character that shows how many plain characters may come; None if none does.

    The plain characters are those that JSON strings need not escape, except DEL. Where the grammar
    accepts at most k probes, it accepts every text of at most k plain characters, and no longer
    text. The reason: only strings without a pattern accept a probe, and other strings that may come
    in their place are not longer.
    """
    try:
        (part,) = json.loads(grammar)["grammars"]
        schema = part["json_schema"]
        options = schema["x-guidance"]
        whitespace = options["whitespace_pattern"]
        given = {key for key, value in part.items() if value is not None}
        if not given <= {"name", "json_schema"} or not options.keys() <= _OPTIONS:
            return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if _WHITESPACE.fullmatch(whitespace) is None or not _has_plain_strings(schema):
        return None
    text = json.dumps({**schema, "x-guidance": None}, ensure_ascii=False)
    return next((probe for probe in _PROBES if probe not in text), None)


def _has_plain_strings(schema: dict[str, Any]) -> bool:
    """Whether the strings of a schema satisfy the conditions in `probe_of`."""
    choices = shaped = False
    bounds, lengths = [], [0]
    for each in schemas_in(schema):
        if "patternProperties" in each or each.get("pattern", DATE) != DATE:
            return False
        if "format" in each and each["format"] not in _FORMATS:
            return False
        shaped |= "format" in each or "pattern" in each
        choices |= "anyOf" in each or "oneOf" in each
        bounds += [each["maxLength"]] if "maxLength" in each else []
        lengths += [len(text) for text in _texts([each.get("enum"), each.get("const")])]
    return not (choices and bounds and (shaped or max(lengths) > min(bounds)))


def _texts(value: Any) -> Iterator[str]:
    """All strings within a JSON value."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend((*each, *each.values()))
