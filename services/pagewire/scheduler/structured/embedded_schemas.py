"""JSON schemas within Lark grammars, where they follow `%json`."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pagewire.grammars.dates import with_real_dates

# llguidance's tokens of Lark in which `%json` may stand for something else, and those with JSON.
_TOKEN = re.compile(
    r"""(?P<skipped>
          (?:\#|//)[^\n]*                     # a comment
        | "(?:\\.|[^"\\\n])*"                 # a text
        | /(?:\\.|[^/\\])+/                   # a regular expression
        | <[^<>\s]+>                         # a special token
        )
        | (?P<keyword>%json|%regex|%llguidance)(?P<blank>\s*)""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()


def embedded_schemas(grammar: str) -> Iterator[tuple[int, int, Any]]:
    """Each schema of a grammar, with its first character and the one behind its last.

    JSON that is malformed ends the search: such a grammar does not compile.
    """
    at = 0
    while (found := _TOKEN.search(grammar, at)) is not None:
        at = found.end()
        if found["keyword"] is None:
            continue
        try:
            value, end = _DECODER.raw_decode(grammar, at)
        except (ValueError, RecursionError):
            return
        if found["keyword"] == "%json":
            yield at, end, value
        at = end


def with_kept_schemas(grammar: str) -> str:
    """The grammar with schemas enforced as other schemas are: dates exist, no check is off."""
    parts, at = [], 0
    for begin, end, schema in embedded_schemas(grammar):
        changed = with_real_dates(schema)
        options = schema.get("x-guidance") if isinstance(schema, dict) else None
        if isinstance(options, dict):
            schema["x-guidance"] = {**options, "lenient": False, "coerce_one_of": False}
            changed = True
        if changed:
            parts += [grammar[at:begin], json.dumps(schema)]
            at = end
    return "".join([*parts, grammar[at:]])
