"""Python's literals within a text that arrives in pieces, turned into JSON."""

import contextlib
import json
import math
import re
from typing import Final

from pagewire.gateway.parsers.json_text import MalformedError, Put, StringValue, escaped
from pagewire.gateway.parsers.reader import Reader, Reading

_MAX_DEPTH = 64
_MAX_NUMBER = 1000  # characters; Python reads integers of some thousand digits
_QUOTES: Final = ("'''", '"""', "'", '"')
_WORD = re.compile(r"[^\s,:=()\[\]{}'\"]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote[0]}]+") for quote in _QUOTES}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")  # as in JSON
_ZEROS = re.compile(r"[-+]?0[0-9]")
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_value(reader: Reader, put: Put, depth: int = 0) -> Reading[None]:
    """Reads a literal, and passes its JSON in pieces to `put`; MalformedError for anything else.

    Names and expressions become strings, so that the model's text is not lost.
    """
    yield from reader.spaces()
    mark = yield from reader.peek()
    if depth > _MAX_DEPTH:
        raise MalformedError
    if mark in ("'", '"'):
        put('"')
        yield from _string(reader, lambda text: put(escaped(text)))
        put('"')
    elif mark and mark in "[(":
        reader.take(1)
        yield from _array(reader, put, "]" if mark == "[" else ")", depth)
    elif mark == "{":
        reader.take(1)
        yield from _object(reader, put, depth)
    else:
        word = yield from reader.whole_run(_WORD)
        if not word or not (yield from reader.peek()):  # the text may be cut off within a word
            raise MalformedError
        put(_constant(word))


def _array(reader: Reader, put: Put, end: str, depth: int) -> Reading[None]:
    put("[")
    count = 0
    while not (yield from _ends(reader, end)):
        if count:
            put(", ")
        yield from read_value(reader, put, depth + 1)
        count += 1
        yield from _separator(reader, end)
    put("]")


def _object(reader: Reader, put: Put, depth: int) -> Reading[None]:
    put("{")
    count = 0
    while not (yield from _ends(reader, "}")):
        if count:
            put(", ")
        yield from _key(reader, put)
        yield from reader.spaces()
        if (yield from reader.peek()) != ":":
            raise MalformedError
        reader.take(1)
        put(": ")
        yield from read_value(reader, put, depth + 1)
        count += 1
        yield from _separator(reader, "}")
    put("}")


def _key(reader: Reader, put: Put) -> Reading[None]:
    """Reads the key of a dict; JSON's keys are strings."""
    if (yield from reader.peek()) in ("'", '"'):
        yield from read_value(reader, put)
        return
    word = yield from reader.whole_run(_WORD)
    if not word:
        raise MalformedError
    put(json.dumps(word, ensure_ascii=False))


def _ends(reader: Reader, end: str) -> Reading[bool]:
    yield from reader.spaces()
    if (yield from reader.peek()) != end:
        return False
    reader.take(1)
    return True


def _separator(reader: Reader, end: str) -> Reading[None]:
    """Reads a comma, which may be missing before the end."""
    yield from reader.spaces()
    mark = yield from reader.peek()
    if mark == ",":
        reader.take(1)
    elif mark != end:
        raise MalformedError


def _constant(word: str) -> str:
    """The JSON of a number or constant; other words become strings."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    if len(word) < _MAX_NUMBER and not _ZEROS.match(word):
        with contextlib.suppress(ValueError):
            return str(int(word, 0))
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(word)):
                return repr(number)
    return json.dumps(word, ensure_ascii=False)


def _string(reader: Reader, put: Put) -> Reading[None]:
    """Reads a string, and passes its value in pieces to `put`."""
    value = StringValue(put)
    quote = yield from reader.match(_QUOTES)
    assert quote is not None
    while (yield from reader.match((quote,))) is None:
        mark = yield from reader.peek()
        if not mark:
            raise MalformedError
        if mark == "\\":
            reader.take(1)
            value.add((yield from _escape(reader)))
        else:
            value.add(reader.run(_PLAIN[quote]) or reader.take(1))
    value.end()


def _escape(reader: Reader) -> Reading[str]:
    """Reads what follows a backslash, and returns its value."""
    mark = yield from reader.peek()
    if not mark:
        raise MalformedError
    if mark in _ESCAPES:
        reader.take(1)
        return _ESCAPES[mark]
    if mark in _DIGITS:
        reader.take(1)
        digits = yield from _take_digits(reader, _DIGITS[mark], "0123456789abcdefABCDEF")
        whole = len(digits) == _DIGITS[mark] and int(digits, 16) < 0x110000
        return chr(int(digits, 16)) if whole else f"\\{mark}{digits}"
    octal = yield from _take_digits(reader, 3, "01234567")
    return chr(int(octal, 8)) if octal else "\\"


def _take_digits(reader: Reader, count: int, allowed: str) -> Reading[str]:
    digits = ""
    while len(digits) < count:
        digit = yield from reader.peek()
        if not digit or digit not in allowed:
            break
        digits += reader.take(1)
    return digits
