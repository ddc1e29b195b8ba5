"""Grammars of arguments in Python's syntax: `city="Köln", days=3`."""

import json
import re
from typing import Any

from pagewire.gateway.conversation.arguments import Parameters, quoted, values_of

_KEY = re.compile(r"[^\W\d]\w{0,511}")
_ANY = '/[A-Za-z_][A-Za-z0-9_]{0,63}/ "=" %json {}'


def python_rules(rule: str, given: Parameters) -> list[str] | None:
    """Rules in Lark for the arguments of a call, in the order of the schema.

    None if a name is not valid in Python. JSON within a list or an object stays JSON.
    """
    if given.any_name:
        return [f'{rule}: ({_ANY} (", " {_ANY})*)?']
    rules, count = [], len(given.schemas)
    for i, (name, schema) in enumerate(given.schemas.items()):
        if not _KEY.fullmatch(name):
            return None
        item = f"{quoted(name + '=')} {rule}_{i}"
        needed = name in given.required
        # The arguments from this one on: `first` without, and `more` with arguments before them.
        first = f"{item} {rule}_{i + 1}_more" + ("" if needed else f" | {rule}_{i + 1}_first")
        more = f'(", " {item})' + ("" if needed else "?")
        rules += [
            f"{rule}_{i}_first: {first}",
            f"{rule}_{i}_more: {more} {rule}_{i + 1}_more",
            f"{rule}_{i}: {' | '.join(_values(given, schema))}",
        ]
    return [f"{rule}: {rule}_0_first", *rules, f"{rule}_{count}_first:", f"{rule}_{count}_more:"]


def _values(given: Parameters, schema: Any) -> list[str]:
    branches = given.branches(schema)
    if branches is None:
        return [given.json_rule(schema)]
    alternatives = []
    for branch in branches:
        values = values_of(branch)
        if values is None and branch.get("type") in ("boolean", "null"):
            values = [True, False] if branch["type"] == "boolean" else [None]
        if values is None:
            alternatives.append(given.json_rule(branch))
        else:
            alternatives += [quoted(_literal(each)) for each in values]
    return alternatives


def _literal(value: Any) -> str:
    simple = value is None or isinstance(value, bool)
    return repr(value) if simple else json.dumps(value, ensure_ascii=False)
