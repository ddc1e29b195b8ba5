"""The incremental parser of one output."""

import re
from collections.abc import Iterable
from typing import Literal

from pagewire.gateway.parsers.calls import CallReader, ToolTypes
from pagewire.gateway.parsers.channels import ChannelReader
from pagewire.gateway.parsers.events import Content, Event, Reasoning
from pagewire.gateway.parsers.json_text import MalformedError
from pagewire.gateway.parsers.reader import Reader, Reading
from pagewire.gateway.parsers.sink import Sink
from pagewire.output_formats import ReasoningFormat, ToolFormat


class OutputParser:
    """Finds reasoning and tool calls in the text of one output, which arrives in any pieces.

    All other text is content, such as a tag in prose or a malformed call. White space next to a tag
    belongs to the format. All other text is in some event. Cost is linear in the text's length.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        in_reasoning: bool = False,
        tools: ToolFormat | None = None,
        types: ToolTypes | None = None,
        max_calls: int | None = None,
    ) -> None:
        """`in_reasoning`: the prompt ends with the tag that opens the reasoning.

        `types` has the tools of the request. Calls beyond `max_calls` are left out.
        """
        self._reader = Reader()
        self._sink = Sink(max_calls)
        self._reasoning = reasoning
        self._in_reasoning = in_reasoning
        self._tools = tools
        self._calls = CallReader(self._reader, self._sink, tools, types or {}) if tools else None
        self._reading = self._read()
        self._plain = False  # all further text is content
        self._state: Literal["none", "open", "ended"] = "none"
        self._channels: ChannelReader | None = None
        if reasoning is not None and reasoning.channels:
            known = None if tools is None else types or {}
            forced = None if tools is None or tools.channels else self._calls
            self._channels = ChannelReader(self._reader, self._sink, known, forced)

    @property
    def reasoning_state(self) -> Literal["none", "open", "ended"]:
        """Whether the text so far has reasoning, and whether the reasoning has ended."""
        return self._state if self._channels is None else self._channels.reasoning_state

    @property
    def reasoning_ends(self) -> int:
        """The number of tags that end reasoning, up to the end of the reasoning."""
        return 1 if self._channels is None else self._channels.reasoning_ends

    def feed(self, text: str) -> list[Event]:
        """The events that follow from more text."""
        if self._plain:
            return [Content(text)] if text else []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The last events, when the text has ended."""
        self._reader.end()
        return [] if self._plain else self._advance()

    def _advance(self) -> list[Event]:
        next(self._reading, None)
        return self._sink.take()

    def _read(self) -> Reading[None]:
        if self._channels is not None:
            yield from self._channels.read()
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is not None and self._calls is not None:
            yield from self._read_content(self._tools, self._calls)
        else:
            yield from self._read_plain()
        self._sink.release()

    def _read_reasoning(self, spec: ReasoningFormat) -> Reading[None]:
        """Reads the reasoning at the output's beginning, if any."""
        reader, sink = self._reader, self._sink
        space = yield from reader.spaces()
        if (yield from reader.match(spec.begins)) is not None:
            yield from reader.spaces()
        elif not self._in_reasoning:
            sink.text(space)
            return
        self._state = "open"
        until = _until(spec.ends)
        while (yield from reader.more()):
            if text := reader.run(until):
                sink.text(text, Reasoning)
            elif (yield from reader.match(spec.ends)) is not None:
                sink.drop_space()
                self._state = "ended"
                yield from reader.spaces()
                return
            else:
                sink.text(reader.take(1), Reasoning)
        sink.release(Reasoning)

    def _read_plain(self) -> Reading[None]:
        """Reads content without tool calls: waits once, then passes all text through."""
        if (yield from self._reader.more()):
            text, at = self._reader.view()
            self._sink.text(self._reader.take(len(text) - at))
            self._sink.release()
        self._plain = True

    def _read_content(self, spec: ToolFormat, calls: CallReader) -> Reading[None]:
        reader, sink = self._reader, self._sink
        tags = spec.begins
        if spec.bare and spec.tagged is not None:
            tags = (*tags, spec.tagged.begin)
        elif spec.bare:
            yield from self._read_section(calls, None)
        if not tags:
            yield from self._read_plain()
            return
        until = _until(tags)
        while (yield from reader.more()):
            if text := reader.run(until):
                sink.text(text)
                continue
            reader.keep()
            tag = yield from reader.match(tags)
            if tag is None:
                reader.take(1)
                sink.text(reader.kept())
            else:
                yield from self._read_section(calls, tag)

    def _read_section(self, calls: CallReader, tag: str | None) -> Reading[None]:
        """Reads calls after a tag; text that turns out not to be a call is content."""
        reader, sink = self._reader, self._sink
        if tag is None:
            reader.keep()
        try:
            yield from calls.section(tag)
        except MalformedError:
            more = yield from reader.more()
            if sink.in_call and more:
                sink.end()
            if not sink.in_call:
                sink.text(reader.kept())
            # The rest of a call that the end cuts off is syntax, as tags are.
            reader.forget()
        else:
            reader.forget()
            yield from reader.spaces()


def _until(tags: Iterable[str]) -> re.Pattern[str]:
    """Matches text up to a character that may begin a tag."""
    return re.compile(f"[^{re.escape(''.join(sorted({tag[0] for tag in tags})))}]+")
