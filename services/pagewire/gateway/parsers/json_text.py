"""JSON within a text that arrives in pieces."""

import json
import re
from collections.abc import Callable

from pagewire.gateway.parsers.reader import Reader, Reading

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"'}

_MAX_NAME = 512

Put = Callable[[str], None]


class MalformedError(Exception):
    """The text does not have the form that was expected."""


def escaped(text: str) -> str:
    """The text as it stands in a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StringValue:
    """The value of a string literal: joins the two halves of a character, and passes text to `put`.

    Literals may have a character outside the basic plane as two \\u escapes. A half alone becomes
    U+FFFD, because UTF-8 cannot express it.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._high = ""

    def add(self, text: str) -> None:
        """Adds text, or the value of one escape."""
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            self.end()
            self._high = text
        elif self._high or (len(text) == 1 and "\udc00" <= text <= "\udfff"):
            text, self._high = self._high + text, ""
            self._put(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        elif text:
            self._put(text)

    def end(self) -> None:
        """The string ends, or another character begins."""
        if self._high:
            self._high = ""
            self._put("\ufffd")


def read_nested(reader: Reader, put: Put) -> Reading[None]:
    """Reads an object or array up to its last bracket, and passes its text in pieces to `put`.

    It checks only brackets and strings, so the model's text stays unchanged. MalformedError if the
    text ends before the last bracket.
    """
    depth, in_string, after_backslash = 0, False, False
    while (yield from reader.more()):
        text, begin = reader.view()
        at = begin
        while at < len(text):
            if after_backslash:
                after_backslash = False
                at += 1
                continue
            found = (_IN_STRING if in_string else _OUTSIDE).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            mark = found.group()
            if mark == "\\":
                after_backslash = True
            elif mark == '"':
                in_string = not in_string
            else:
                depth += 1 if mark in "{[" else -1
                if depth == 0:
                    break
        put(reader.take(at - begin))
        if depth == 0:
            return
    raise MalformedError


def read_string(reader: Reader, put: Put) -> Reading[None]:
    """Reads a JSON string, and passes its value in pieces to `put`.

    MalformedError if the text ends inside. A backslash that begins no escape stays as it is.
    """
    yield from expect(reader, '"')
    value = StringValue(put)
    while True:
        mark = yield from reader.peek()
        if mark == "":
            raise MalformedError
        if mark not in '"\\':
            value.add(reader.run(_PLAIN))
            continue
        reader.take(1)
        if mark == '"':
            value.end()
            return
        value.add((yield from _escape(reader)))


def read_word(reader: Reader) -> Reading[str]:
    """Reads a name in quotes, of at most 512 characters."""
    pieces: list[str] = []
    size = 0

    def put(piece: str) -> None:
        nonlocal size
        size += len(piece)
        if size > _MAX_NAME:
            raise MalformedError
        pieces.append(piece)

    yield from read_string(reader, put)
    return "".join(pieces)


def expect(reader: Reader, mark: str) -> Reading[None]:
    """Reads this character; MalformedError for another one."""
    if (yield from reader.peek()) != mark:
        raise MalformedError
    reader.take(1)


def _escape(reader: Reader) -> Reading[str]:
    """Reads what follows a backslash: its value, one UTF-16 unit for a \\u escape."""
    mark = yield from reader.peek()
    if mark == "":
        raise MalformedError
    if mark in _ESCAPES:
        reader.take(1)
        return _ESCAPES[mark]
    if mark != "u":
        return "\\"
    reader.take(1)
    digits = ""
    while len(digits) < 4:
        digit = yield from reader.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            return f"\\u{digits}"
        digits += reader.take(1)
    return chr(int(digits, 16))
