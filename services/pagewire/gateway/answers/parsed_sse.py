"""Server-sent events of chats with reasoning or tool calls."""

import json
from collections.abc import Sequence
from typing import Any

from pagewire.errors import RequestError
from pagewire.gateway.answers.paced_json import object_pieces, paced_logprobs
from pagewire.gateway.answers.parsed_output import ParsedOutput
from pagewire.gateway.answers.sse import DONE, error_event, event
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.chat_output import delta_of, with_calls
from pagewire.gateway.api.formatting import json_ascii, usage
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.parsers.events import CallArguments, Content, Event, Reasoning
from pagewire.gateway.parsers.output_format import OutputFormat

_PLACEHOLDER = "\x00"  # stands for the text while the rest of a chunk is formatted


class ParsedChunkWriter:
    """Formats the chunks of one answer: one for each piece of reasoning, content or arguments.

    The JSON around the pieces is formatted once.
    """

    def __init__(
        self,
        formatter: ChatFormatter,
        output: OutputFormat,
        include_usage: bool,
        counts_come_last: bool = True,
    ) -> None:
        """See `ChunkWriter` for the last two arguments."""
        self._formatter = formatter
        self._has_tools = bool(output.tools)
        self._parsed = ParsedOutput(output)
        self._include_usage = include_usage
        self._usage = {"usage": None} if include_usage and counts_come_last else {}
        self._around: dict[tuple[int, str, int], list[str]] = {}
        self._opened: set[int] = set()

    async def write_paced(self, generation: Generation, pacer: Pacer) -> list[str]:
        """The events for a generation's new output, in pieces, without blocking the event loop."""
        finish, index = generation.finish, generation.index
        events = await self._parsed.take(generation, pacer)
        if not events and finish is None:
            return []
        log = generation.logprobs
        logprobs = None
        if log is not None and log.waiting:
            logprobs = await paced_logprobs(self._formatter, [log], pacer, json_ascii)
        pieces = [] if index in self._opened else [self._opening(index)]
        for each in events:
            if logprobs is None and isinstance(each, Content | Reasoning | CallArguments):
                pieces.append(self._text_chunk(index, each))
            elif (delta := delta_of(each, self._parsed.short_ids)) is not None:
                pieces += self._chunk(self._formatter.delta(index, delta), logprobs)
                logprobs = None
            await pacer.pause_if_due()
        if finish is not None:
            last = self._formatter.ending(index, "", finish)
            pieces += self._chunk(
                with_calls(last, finish, self._parsed.has_calls(generation)), logprobs
            )
        return pieces

    def closing(self, generations: Sequence[Generation]) -> str:
        """The event with the token counts, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = usage(generations, self._parsed.reasoning_tokens(generations))
        return event(json_ascii(self._formatter.envelope.wrap([], usage=counts))) + DONE

    def failure(self, error: RequestError) -> str:
        """The error, as the last event."""
        return error_event(error)

    def _opening(self, index: int) -> str:
        self._opened.add(index)
        content = None if self._has_tools else ""
        return "".join(
            self._chunk(
                self._formatter.delta(index, {"role": "assistant", "content": content}), None
            )
        )

    def _text_chunk(self, index: int, each: Content | Reasoning | CallArguments) -> str:
        call = each.index if isinstance(each, CallArguments) else 0
        text = each.json if isinstance(each, CallArguments) else each.text
        key = (index, type(each).__name__, call)
        around = self._around.get(key)
        if around is None:
            stand_in: Event
            if isinstance(each, CallArguments):
                stand_in = CallArguments(each.index, _PLACEHOLDER)
            else:
                stand_in = type(each)(_PLACEHOLDER)
            delta = delta_of(stand_in, False)
            assert delta is not None
            chunk = "".join(self._chunk(self._formatter.delta(index, delta), None))
            around = self._around[key] = chunk.split(json_ascii(_PLACEHOLDER))
        return json.dumps(text).join(around)

    def _chunk(self, choice: dict[str, Any], logprobs: list[str] | None) -> list[str]:
        """The event of a choice; `logprobs` are the pieces of their JSON."""
        if logprobs is None:
            return [event(json_ascii(self._formatter.envelope.wrap([choice], **self._usage)))]
        written = object_pieces({**choice, "logprobs": None}, "logprobs", logprobs, json_ascii)
        chunk = self._formatter.envelope.wrap([], **self._usage)
        return [
            "data: ",
            *object_pieces(chunk, "choices", ["[", *written, "]"], json_ascii),
            "\n\n",
        ]
