"""Reads outputs that are messages in channels: OpenAI's harmony format, as gpt-oss writes it.

An output is `header <|message|> body end`, repeated. A header names a channel, and for a call the
tool: `<|channel|>commentary to=functions.NAME <|constrain|>json`. Every header except the first
begins with `<|start|>assistant`; for the first one, this is the end of the prompt.
"""

import re
from collections.abc import Callable, Container
from typing import Literal

from pagewire.gateway.parsers.calls import CallReader
from pagewire.gateway.parsers.events import Content, Event, Reasoning
from pagewire.gateway.parsers.json_text import MalformedError, read_nested
from pagewire.gateway.parsers.reader import Reader, Reading
from pagewire.gateway.parsers.sink import Sink

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER_TAGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
# Beginnings of a header; the recipient only directly after the prompt.
_BEGINS = (_START, _CHANNEL)
_RECIPIENT_BEGINS = " to="
_MAX_HEADER = 1024

_TEXT = re.compile(r"[^<]+")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([\w.\-/]+)")
_FUNCTIONS = "functions."

Kind = Callable[[str], Event]


class ChannelReader:
    """Reads one output. The channel `analysis` is reasoning; all other text is content.

    An empty line separates consecutive messages of one kind. Tags and headers are not text. Calls
    are read if there are `tools`; with `forced`, the final message may also begin with calls in
    another format.
    """

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        tools: Container[str] | None,
        forced: CallReader | None = None,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._tools = tools
        self._forced = forced
        self._written: set[Kind] = set()  # the kinds that have text
        self.reasoning_state: Literal["none", "open", "ended"] = "none"
        self.ends = 0  # tags `<|end|>` so far
        self.reasoning_ends = 0  # those up to the end of the reasoning

    def read(self) -> Reading[None]:
        """Reads the whole output."""
        reader = self._reader
        begins: tuple[str, ...] = (*_BEGINS, _RECIPIENT_BEGINS)
        while (yield from reader.more()):
            reader.keep()
            tag = yield from reader.match(begins)
            begins = _BEGINS
            if tag is None:
                reader.forget()
                yield from self._text(Content)
                continue
            header = yield from self._header(tag)
            if header is None:  # the characters just read are text
                self._write(reader.kept(), Content, first=True)
                yield from self._text(Content, first=False)
                continue
            reader.forget()
            yield from self._body(header)

    def _header(self, begin: str) -> Reading[str | None]:
        """The header that begins with a tag; empty if the output ends in it, None if not one."""
        reader, pieces = self._reader, [begin]
        while (yield from reader.more()):
            read = reader.run(_TEXT)
            if not read:
                tag = yield from reader.match(_HEADER_TAGS)
                if tag == _MESSAGE:
                    return "".join(pieces)
                if tag is not None and tag in _ENDS:
                    return None
                read = tag or reader.take(1)
            pieces.append(read)
            if sum(map(len, pieces)) > _MAX_HEADER:
                return None
        return ""

    def _body(self, header: str) -> Reading[None]:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = self._tool(recipient[1]) if recipient is not None else None
        if name is not None:
            yield from self._call(name)
            yield from self._text(Content, first=False)
            return
        if channel is not None and channel[1] == "analysis":
            self.reasoning_state = "open"
            yield from self._text(Reasoning)
            return
        if channel is not None and channel[1] == "final" and self._forced is not None:
            yield from self._forced_calls(self._forced)
            yield from self._text(Content, first=False)
            return
        yield from self._text(Content)

    def _tool(self, recipient: str) -> str | None:
        """The tool that a message calls; None if it is not a tool of the request."""
        if self._tools is None:
            return None
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS) or None
        return recipient if recipient in self._tools else None

    def _call(self, name: str) -> Reading[None]:
        """Reads the arguments of a call; the rest of the message is content."""
        reader, sink = self._reader, self._sink
        reader.keep()
        yield from reader.spaces()
        mark = yield from reader.peek()
        end = None if mark == "{" else (yield from reader.match(_ENDS))
        if mark != "{" and end is None:
            self._write(reader.kept(), Content, first=True)
            return
        reader.forget()
        sink.begin(name)
        if end is not None:
            self._count(end)
            sink.arguments("{}")
        else:
            try:
                yield from read_nested(reader, sink.arguments)
            except MalformedError:  # the output ends in the arguments
                return
        sink.end()

    def _forced_calls(self, calls: CallReader) -> Reading[None]:
        reader, sink = self._reader, self._sink
        reader.keep()
        try:
            yield from calls.section(None)
        except MalformedError:
            more = yield from reader.more()
            if sink.in_call and more:
                sink.end()
            if not sink.in_call:
                self._write(reader.kept(), Content, first=True)
        reader.forget()

    def _text(self, kind: Kind, first: bool = True) -> Reading[None]:
        """Reads text up to the end of a message, or to the next header.

        `first`: nothing of the message was read before.
        """
        reader, sink = self._reader, self._sink
        while (yield from reader.more()):
            if text := reader.run(_TEXT):
                self._write(text, kind, first)
                first = False
                continue
            if (yield from self._at_header()):
                break
            tag = yield from reader.match(_ENDS)
            if tag is not None:
                self._count(tag)
                break
            self._write(reader.take(1), kind, first)
            first = False
        else:
            sink.release(kind)
            return
        sink.drop_space()
        if kind is Reasoning:
            self.reasoning_state, self.reasoning_ends = "ended", self.ends

    def _at_header(self) -> Reading[bool]:
        """Whether a header follows; it stays unread."""
        while True:
            text, at = self._reader.view()
            left = text[at:]
            if left.startswith(_BEGINS):
                return True
            if not any(tag.startswith(left) for tag in _BEGINS) or self._reader.ended:
                return False
            yield

    def _write(self, text: str, kind: Kind, first: bool = False) -> None:
        """Adds text, after an empty line if it is the first of a further message."""
        if first and kind in self._written:
            self._sink.text("\n\n", kind)
        self._sink.text(text, kind)
        if text.strip():
            self._written.add(kind)

    def _count(self, end: str) -> None:
        self.ends += end == _ENDS[0]
