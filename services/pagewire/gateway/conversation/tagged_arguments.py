"""Grammars of arguments between tags, whose strings have no quotes; see TaggedCalls."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pagewire.gateway.conversation.arguments import ANNOTATIONS, Parameters, quoted, values_of
from pagewire.gateway.parsers.tagged_value import json_of
from pagewire.output_formats import TaggedCalls

_KEY = re.compile(r"[^<>\n]{1,512}")
_STRING = frozenset({"string"})
_NULL = frozenset({"null"})
# Keywords allowed for a string that is not written as JSON.
_STRING_KEYWORDS = ANNOTATIONS | {"type", "minLength", "maxLength"}


def tagged_rules(
    rule: str, given: Parameters, types: Mapping[str, frozenset[str]], spec: TaggedCalls
) -> list[str] | None:
    """Rules in Lark for the arguments of a call; None if they cannot enforce a schema.

    By `types` the parser distinguishes a string from other JSON.
    """
    values = _Values(given, spec)
    if given.any_name:
        key = f"{quoted(spec.key_begin)} /[^<>\\n]+/ {quoted(spec.key_end + chr(10))}"
        text = values.text(f"{rule}_value", "*")
        return [*text, f'{rule}: ({key} {rule}_value "\\n")*']
    rules, parts = [], []
    for i, (name, schema) in enumerate(given.schemas.items()):
        made = values.rules(f"{rule}_{i}", schema, types.get(name, _STRING))
        if made is None or not _KEY.fullmatch(name):
            return None
        rules += made
        begin = quoted(f"{spec.key_begin}{name}{spec.key_end}\n")
        optional = "" if name in given.required else "?"
        parts.append(f'({begin} {rule}_{i} "\\n"){optional}')
    return [*rules, f"{rule}: {' '.join(parts)}"]


class _Values:
    """Rules for values, each with its closing tag."""

    def __init__(self, given: Parameters, spec: TaggedCalls) -> None:
        self._given = given
        self._closing_tag = spec.value_end
        self._end = f"\n{spec.value_end}"

    def rules(self, rule: str, schema: Any, types: frozenset[str]) -> list[str] | None:
        """Rules of a parameter, first `rule`; None if text could be read as another value."""
        branches = self._given.branches(schema)
        if branches is None:
            return None
        alternatives: list[str] = []
        texts: list[str] = []  # their lengths, as a repetition
        for branch in branches:
            values, kind = values_of(branch), branch.get("type")
            if values is not None:
                written = [each if isinstance(each, str) else json.dumps(each) for each in values]
                if any(
                    not self._is_read(*each, types) for each in zip(written, values, strict=True)
                ):
                    return None
                alternatives += [quoted(each + self._end) for each in written]
            elif kind == "string" or not branch.keys() - ANNOTATIONS:
                if branch.keys() - _STRING_KEYWORDS or (
                    (kind and not types) or types - _STRING - _NULL
                ):
                    return None
                longest = branch.get("maxLength", "")
                texts.append(f"{{{branch.get('minLength', 0)},{longest}}}")
            elif kind == "null":
                alternatives.append(quoted("null" + self._end))
            else:
                alternatives.append(f"{self._given.json_rule(branch)} {quoted(self._end)}")
        if not texts:
            return [f"{rule}: {' | '.join(alternatives)}"]
        if len(texts) > 1 or not all(each.startswith('"') for each in alternatives):
            return None
        return self.text(rule, texts[0], *alternatives)

    def text(self, rule: str, repetition: str, *alternatives: str) -> list[str]:
        """A text without the closing tag, or one of the alternatives."""
        tag = re.escape(self._closing_tag).replace("/", "\\/")
        name = f"{rule.upper()}_TEXT"
        ends = " | ".join([f"{name} {quoted(self._end)}", *alternatives])
        text = rf"/(.|\n){repetition}/ & ~/(.|\n)*{tag}(.|\n)*/"
        return [f"{rule}[lazy]: {ends}", f"{name}: {text}"]

    def _is_read(self, text: str, value: Any, types: frozenset[str]) -> bool:
        """Whether the parser reads the text as the value."""
        if self._closing_tag in text:
            return False
        if types == _STRING:
            return isinstance(value, str)
        return bool(json.loads(json_of(text, types)) == value)
