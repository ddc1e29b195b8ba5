"""vLLM's structural tags: free text, in which a trigger begins a part with a schema of its own."""

import json
from typing import Any

from llguidance import LLTokenizer, StructTag

from pagewire.errors import invalid
from pagewire.grammars.dates import with_real_dates

_KEYS = {"type", "structures", "triggers"}
_STRUCTURE_KEYS = {"begin", "schema", "end"}


def structural_tag_grammar(
    text: str, field: str, tokenizer: LLTokenizer, options: dict[str, Any]
) -> str:
    """The grammar of a structural tag as JSON text.

    RequestError for another form of structural tag, ValueError for text that is not JSON.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise invalid(field, f"{field} is not a JSON object")
    if unknown := sorted(tag.keys() - _KEYS):
        raise invalid(
            field,
            f"{field}.{unknown[0]} is not supported; give structures (begin, schema, end) and "
            "triggers",
        )
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise invalid(f"{field}.triggers", f"{field}.triggers must be a list of texts, none empty")
    if not isinstance(structures, list) or not structures:
        raise invalid(f"{field}.structures", f"{field}.structures must be a list, not empty")
    special = {trigger: is_special(tokenizer, trigger) for trigger in triggers}
    if len(set(special.values())) > 1:
        raise invalid(
            f"{field}.triggers",
            f"{field}.triggers has special tokens of the model and other texts; give one kind",
        )
    tags = [
        _tag(entry, f"{field}.structures[{i}]", triggers, options)
        for i, entry in enumerate(structures)
    ]
    return StructTag.to_grammar(tags, assume_special=any(special.values()))


def is_special(tokenizer: LLTokenizer, text: str) -> bool:
    """Whether a text is the name of one special token."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return len(tokens) == 1 and tokenizer.is_special_token(tokens[0])


def _tag(entry: Any, field: str, triggers: list[str], options: dict[str, Any]) -> StructTag:
    if not isinstance(entry, dict) or entry.keys() - _STRUCTURE_KEYS:
        raise invalid(field, f"{field} must be an object with begin, schema and end")
    begin, schema, end = entry.get("begin"), entry.get("schema", {}), entry.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise invalid(field, f"{field}: begin and end must be texts, and schema an object")
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise invalid(f"{field}.begin", f"{field}.begin starts with none of the triggers")
    with_real_dates(schema)
    return StructTag(
        trigger=trigger, begin=begin, grammar={**schema, "x-guidance": options}, end=end
    )
