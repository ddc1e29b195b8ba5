"""Reads the tool calls of a format, each kind by its own grammar.

A call counts after its name and the beginning of its arguments were read. Before that, the text may
turn out not to be a call: MalformedError, and the reader has kept the whole text.
"""

import re
from collections.abc import Mapping

from pagewire.gateway.parsers.json_text import (
    MalformedError,
    escaped,
    expect,
    read_nested,
    read_string,
    read_word,
)
from pagewire.gateway.parsers.python_text import read_value
from pagewire.gateway.parsers.reader import Reader, Reading
from pagewire.gateway.parsers.sink import Sink
from pagewire.gateway.parsers.tagged_value import read_json_value, read_text_value
from pagewire.output_formats import JsonCalls, NamedCalls, TaggedCalls, ToolFormat

# By tool: the JSON types that each of its arguments may have; an empty set stands for any.
ToolTypes = Mapping[str, Mapping[str, frozenset[str]]]

_MAX_NAME = 512
_NAME = re.compile(r"[\w.\-/]+")
_KEY = re.compile(r"[^<>\n]+")
_ID = re.compile(r"[\w\-]+")
_IDENTIFIER = re.compile(r"\w+")
_SCALAR = re.compile(r"[^\s,:\[\]{}\"]+")
_STRING = frozenset({"string"})


class CallReader:
    """Reads the calls of one output. With `known_only`, names of other tools are not calls."""

    def __init__(self, reader: Reader, sink: Sink, spec: ToolFormat, tools: ToolTypes) -> None:
        self._reader = reader
        self._sink = sink
        self._spec = spec
        self._tools = tools
        self._known_only = False

    def section(self, tag: str | None) -> Reading[None]:
        """Reads the calls after a tag; without a tag, at the beginning of the output.

        MalformedError where no call follows, or where the last call is cut off.
        """
        reader, spec = self._reader, self._spec
        in_call = spec.tagged is not None and tag == spec.tagged.begin
        self._known_only = in_call or tag is None
        yield from reader.spaces()
        mark = yield from reader.peek()
        if spec.json is not None and mark and mark in "[{":
            yield from self._json_calls(spec.json, mark)
        elif spec.named is not None and tag is not None:
            yield from self._named_calls(spec.named)
        elif spec.tagged is not None:
            yield from self._tagged_calls(spec.tagged, in_call)
        elif spec.python is not None:
            yield from self._python_calls()
        else:
            raise MalformedError
        yield from reader.spaces()
        # A tag of named calls that is cut off may also begin another call.
        yield from (reader.closing if spec.named is None else reader.match)(spec.ends)

    def _begin(self, name: str) -> None:
        if not name or len(name) > _MAX_NAME or (self._known_only and name not in self._tools):
            raise MalformedError
        self._reader.forget()
        self._sink.begin(name)

    def _end(self) -> None:
        self._sink.end()
        self._reader.keep()

    # Objects of JSON

    def _json_calls(self, spec: JsonCalls, mark: str) -> Reading[None]:
        reader = self._reader
        in_array = mark == "["
        if in_array:
            reader.take(1)
        while True:
            yield from reader.spaces()
            yield from self._json_call(spec)
            yield from reader.spaces()
            if in_array:
                if (yield from reader.peek()) == "]":
                    reader.take(1)
                    return
                yield from expect(reader, ",")
            elif (yield from reader.match(self._spec.separators)) is None:
                return

    def _json_call(self, spec: JsonCalls) -> Reading[None]:
        """Reads one object. Arguments before the name are kept until the name arrives."""
        reader, sink = self._reader, self._sink
        name, begun = "", False
        waiting: list[str] | None = None
        yield from expect(reader, "{")
        while (key := (yield from self._json_key())) is not None:
            if begun:
                yield from self._skip_value()
            elif key in spec.names and not name:
                name = yield from read_word(reader)
                if begun := waiting is not None:
                    self._whole_call(name, waiting)
            elif key in spec.arguments and name and (yield from reader.peek()) == "{":
                self._begin(name)
                yield from read_nested(reader, sink.arguments)
                self._end()
                begun = True
            elif key in spec.arguments and waiting is None:
                waiting = yield from self._argument_text()
                if begun := bool(name):
                    self._whole_call(name, waiting)
            else:
                yield from self._skip_value()
        if not begun:
            if self._known_only:
                raise MalformedError
            self._whole_call(name, ["{}"])
        reader.keep()

    def _whole_call(self, name: str, arguments: list[str] | None) -> None:
        self._begin(name)
        for piece in arguments or ():
            self._sink.arguments(piece)
        self._end()

    def _json_key(self) -> Reading[str | None]:
        """Reads up to the value of the next key of an object; None at the object's end.

        A comma before the first key is not an error, and neither is a missing comma.
        """
        reader = self._reader
        yield from reader.spaces()
        mark = yield from reader.peek()
        if mark == ",":
            reader.take(1)
            yield from reader.spaces()
        elif mark == "}":
            reader.take(1)
            return None
        key = yield from read_word(reader)
        yield from reader.spaces()
        yield from expect(reader, ":")
        yield from reader.spaces()
        return key

    def _argument_text(self) -> Reading[list[str]]:
        """Reads arguments as a whole: an object, a string that holds its JSON, or null."""
        pieces: list[str] = []
        mark = yield from self._reader.peek()
        if mark == "{":
            yield from read_nested(self._reader, pieces.append)
        elif mark == '"' and not self._known_only:
            yield from read_string(self._reader, pieces.append)
        elif not self._known_only and (yield from self._reader.whole_run(_SCALAR)) == "null":
            pieces.append("{}")
        else:
            raise MalformedError
        return pieces

    def _skip_value(self) -> Reading[None]:
        mark = yield from self._reader.peek()
        if mark in ("{", "["):
            yield from read_nested(self._reader, _ignore)
        elif mark == '"':
            yield from read_string(self._reader, _ignore)
        elif not (yield from self._reader.whole_run(_SCALAR)):
            raise MalformedError

    # A name, then JSON

    def _named_calls(self, spec: NamedCalls) -> Reading[None]:
        reader = self._reader
        while not spec.begin or (yield from reader.match((spec.begin,))) is not None:
            yield from self._named_call(spec)
            yield from reader.spaces()
            if (yield from reader.closing(spec.ends)) is not None:
                yield from reader.spaces()
            reader.keep()
            if not spec.begin:
                return
        if not self._sink.calls:
            raise MalformedError

    def _named_call(self, spec: NamedCalls) -> Reading[None]:
        reader = self._reader
        yield from reader.match(spec.prefixes)
        name = yield from reader.whole_run(_NAME)
        found = yield from reader.match((*spec.separators, spec.id_begin))
        if found is not None and found == spec.id_begin:
            yield from reader.whole_run(_ID)
            found = yield from reader.match(spec.separators)
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            raise MalformedError
        self._begin(name)
        yield from read_nested(reader, self._sink.arguments)
        self._end()

    # Tags

    def _tagged_calls(self, spec: TaggedCalls, in_call: bool) -> Reading[None]:
        reader = self._reader
        if spec.begin and not in_call and (yield from reader.match((spec.begin,))) is None:
            raise MalformedError
        while True:
            yield from self._tagged_call(spec)
            yield from reader.spaces()
            if not spec.begin or (yield from reader.match((spec.begin,))) is None:
                return

    def _tagged_call(self, spec: TaggedCalls) -> Reading[None]:
        reader, sink = self._reader, self._sink
        name = yield from reader.whole_run(_NAME)
        if spec.name_end and (yield from reader.match((spec.name_end,))) is None:
            raise MalformedError
        yield from reader.spaces()
        tag = yield from reader.match((spec.key_begin, spec.end))
        if tag is None:
            raise MalformedError
        self._begin(name)
        types = self._tools.get(name, {})
        before = "{"
        while tag == spec.key_begin:
            reader.keep()
            key = yield from reader.whole_run(_KEY)
            found = yield from reader.closing((spec.key_end,))
            if found is not None and spec.value_begin:
                yield from reader.spaces()
                found = yield from reader.closing((spec.value_begin,))
            if found is None or not key or len(key) > _MAX_NAME:
                raise MalformedError
            reader.forget()
            sink.arguments(f'{before}"{escaped(key)}": ')
            before = ", "
            allowed = types.get(key, _STRING)
            if allowed == _STRING:
                yield from read_text_value(reader, spec, sink.arguments)
            else:
                yield from read_json_value(reader, spec, allowed, sink.arguments)
            reader.keep()
            yield from reader.spaces()
            tag = yield from reader.closing((spec.key_begin, spec.end))
            if tag is None:
                sink.arguments("}" if (yield from reader.more()) else "")
                raise MalformedError
        sink.arguments("{}" if before == "{" else "}")
        self._end()

    # Python

    def _python_calls(self) -> Reading[None]:
        reader = self._reader
        yield from expect(reader, "[")
        while True:
            yield from self._python_call()
            yield from reader.spaces()
            if (yield from reader.peek()) == "]":
                reader.take(1)
                return
            yield from expect(reader, ",")

    def _python_call(self) -> Reading[None]:
        reader, sink = self._reader, self._sink
        yield from reader.spaces()
        name = yield from reader.whole_run(_NAME)
        yield from expect(reader, "(")
        yield from reader.spaces()
        before = "{"
        while (yield from reader.peek()) != ")":
            key = yield from reader.whole_run(_IDENTIFIER)
            yield from reader.spaces()
            yield from expect(reader, "=")
            if not key or (yield from reader.peek()) == "=":
                raise MalformedError
            if not sink.in_call:
                self._begin(name)
            reader.forget()
            sink.arguments(f'{before}"{escaped(key)}": ')
            before = ", "
            yield from read_value(reader, sink.arguments)
            reader.keep()
            yield from reader.spaces()
            mark = yield from reader.peek()
            if mark == ",":
                reader.take(1)
                yield from reader.spaces()
            elif mark != ")":
                sink.arguments("}" if mark else "")
                raise MalformedError
        if not sink.in_call:
            self._begin(name)
        reader.take(1)
        sink.arguments("{}" if before == "{" else "}")
        self._end()


def _ignore(text: str) -> None:
    pass
