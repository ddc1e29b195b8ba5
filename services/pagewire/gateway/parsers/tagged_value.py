"""The text of an argument between tags, turned into JSON."""

import json
from typing import NoReturn

from pagewire.gateway.parsers.json_text import MalformedError, Put, escaped
from pagewire.gateway.parsers.reader import Reader, Reading
from pagewire.output_formats import TaggedCalls

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def read_text_value(reader: Reader, spec: TaggedCalls, put: Put) -> Reading[None]:
    """Reads a string up to its closing tag, and passes its JSON in pieces to `put`."""
    put('"')
    yield from _read(reader, spec, lambda text: put(escaped(text)))
    put('"')


def read_json_value(
    reader: Reader, spec: TaggedCalls, types: frozenset[str], put: Put
) -> Reading[None]:
    """Reads a value of one of `types` up to its closing tag, and passes its JSON to `put`."""
    pieces: list[str] = []
    yield from _read(reader, spec, pieces.append)
    put(json_of("".join(pieces), types))


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument's text: itself if it is JSON of one of the types, else a string.

    An empty set of types allows any. null stands for an argument that is left out.
    """
    word = text.strip()
    word = _PYTHON_WORDS.get(word, word)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if value is None or (not isinstance(value, str) and (not types or types & _TYPES[type(value)])):
        return word
    return json.dumps(text, ensure_ascii=False)


def _read(reader: Reader, spec: TaggedCalls, put: Put) -> Reading[None]:
    """Reads up to the closing tag. With `spec.newlines`, one newline at each end belongs to the
    tags."""
    newline = ""  # held back: the tag may follow
    if spec.newlines and (yield from reader.peek()) == "\n":
        reader.take(1)
    while (yield from reader.more()):
        if (yield from reader.match((spec.value_end,))) is not None:
            return
        text, at = reader.view()
        end = text.find(spec.value_end[0], at + 1)
        piece = newline + reader.take((len(text) if end < 0 else end) - at)
        newline = "\n" if spec.newlines and piece.endswith("\n") else ""
        put(piece.removesuffix("\n") if newline else piece)
    put(newline)
    raise MalformedError


def _refuse(constant: str) -> NoReturn:
    """NaN and infinity are not JSON."""
    raise ValueError(constant)
