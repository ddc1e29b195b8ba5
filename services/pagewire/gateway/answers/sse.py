"""Answers as server-sent events."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.errors import RequestError
from pagewire.gateway.answers.paced_json import (
    TOKENS_A_PIECE,
    object_pieces,
    paced_logprobs,
)
from pagewire.gateway.answers.run import Run
from pagewire.gateway.api.formatting import Formatter, json_ascii, new_logprobs, usage
from pagewire.gateway.errors import ApiError, ClientGoneError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.generation.prompt_log import PromptLog

# The key of the server's own `send` in the state of a request. The framework's layers look at the
# beginning and the end of an answer, so the pieces between need not pass through them.
SEND = "send"

DONE = "data: [DONE]\n\n"
_LARGE_PIECE = 4096  # characters
_PLACEHOLDER = "\x00"  # stands for the text while the rest of a chunk is formatted


class Writer(Protocol):
    """Formats the events of one answer."""

    async def write_paced(self, generation: Generation, pacer: Pacer) -> list[str]:
        """The events for a generation's new output and its end, in pieces."""
        ...

    def closing(self, generations: Sequence[Generation]) -> str:
        """The events after the end of all generations."""
        ...

    def failure(self, error: RequestError) -> str:
        """The events at the end of a stream that fails."""
        ...


class ChunkWriter:
    """Formats the chunks of one answer. The JSON around a choice's text is formatted once."""

    def __init__(
        self, formatter: Formatter, include_usage: bool, counts_come_last: bool = True
    ) -> None:
        """`counts_come_last`: the chunks say that the token counts are in the last one only."""
        self._formatter = formatter
        self._include_usage = include_usage
        self._usage = {"usage": None} if include_usage and counts_come_last else {}
        self._around: dict[int, tuple[str, str]] = {}
        self._echoed: set[int] = set()  # choices whose prompts were written

    async def write_paced(self, generation: Generation, pacer: Pacer) -> list[str]:
        """Does the same as `write`, in pieces and without blocking the event loop.

        An echoed prompt is first, in its own chunk.
        """
        if generation.prompt is None or generation.index in self._echoed:
            return await self._write_output(generation, pacer)
        self._echoed.add(generation.index)
        echo = await self._write_prompt(generation.index, generation.prompt, pacer)
        return [*echo, *await self._write_output(generation, pacer)]

    async def _write_prompt(self, index: int, prompt: PromptLog, pacer: Pacer) -> list[str]:
        if not prompt.wishes.echo:
            return []
        choice = self._formatter.piece(index, prompt.text)
        if prompt.wishes.echoed_top is None:
            return [self._event(choice)]
        logprobs = await paced_logprobs(self._formatter, [prompt.echoed()], pacer, json_ascii)
        return self._large_event(choice, logprobs)

    def _large_event(self, choice: dict[str, Any], logprobs: list[str]) -> list[str]:
        """The event of a choice whose log probabilities are in pieces."""
        written = object_pieces({**choice, "logprobs": None}, "logprobs", logprobs, json_ascii)
        chunk = self._formatter.envelope.wrap([], **self._usage)
        return [
            "data: ",
            *object_pieces(chunk, "choices", ["[", *written, "]"], json_ascii),
            "\n\n",
        ]

    async def _write_output(self, generation: Generation, pacer: Pacer) -> list[str]:
        log = generation.logprobs
        if log is None or log.waiting <= TOKENS_A_PIECE:
            text = self.write(generation)
            await pacer.pause_if_due()
            return [text]
        text, finish = generation.take_text(), generation.finish
        if not text and finish is None:
            return []
        opening = self._opening(generation.index)
        choice = self._choice(generation, text)
        logprobs = await paced_logprobs(self._formatter, [log], pacer, json_ascii)
        return [opening, *self._large_event(choice, logprobs)]

    def write(self, generation: Generation) -> str:
        """The events for a generation's new output: its opening, its text, its end."""
        text = generation.take_text()
        if not text and generation.finish is None:
            return ""
        if generation.finish is not None or generation.logprobs is not None:
            opening = self._opening(generation.index)
            return opening + self._with_logprobs(generation, self._choice(generation, text))
        around = self._around.get(generation.index)
        if around is None:
            opening = self._opening(generation.index)
            around = self._around[generation.index]
            return f"{opening}{around[0]}{json.dumps(text)}{around[1]}"
        return f"{around[0]}{json.dumps(text)}{around[1]}"

    def closing(self, generations: Sequence[Generation]) -> str:
        """The event with the token counts, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        chunk = self._formatter.envelope.wrap([], usage=usage(generations))
        return event(json_ascii(chunk)) + DONE

    def failure(self, error: RequestError) -> str:
        """The error, as the last event."""
        return error_event(error)

    def _opening(self, index: int) -> str:
        """The event that begins a choice; empty if it was written before or there is none."""
        if index in self._around:
            return ""
        piece = self._event(self._formatter.piece(index, _PLACEHOLDER))
        before, _, after = piece.partition(json_ascii(_PLACEHOLDER))
        self._around[index] = (before, after)
        choice = self._formatter.opening(index)
        return self._event(choice) if choice is not None else ""

    def _choice(self, generation: Generation, text: str) -> dict[str, Any]:
        if generation.finish is None:
            return self._formatter.piece(generation.index, text)
        return self._formatter.ending(generation.index, text, generation.finish)

    def _with_logprobs(self, generation: Generation, choice: dict[str, Any]) -> str:
        return self._event({**choice, "logprobs": new_logprobs(self._formatter, generation)})

    def _event(self, choice: dict[str, object]) -> str:
        return event(json_ascii(self._formatter.envelope.wrap([choice], **self._usage)))


class EventStream(Response):
    """Writes the output of a run as it arrives; `first` are the updates received so far."""

    media_type = "text/event-stream"

    def __init__(self, run: Run, first: list[Generation], writer: Writer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._first = first
        self._writer = writer
        plain = [g.logprobs is None and g.prompt is None for g in run.generations] == [True]
        self._plain = writer.write if plain and isinstance(writer, ChunkWriter) else None
        self._ended: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream; an error becomes its last event."""
        try:
            # In a task of its own: each wake-up of a task passes through all of its coroutines,
            # and above this one are more than twenty of the web framework.
            await asyncio.create_task(self._send_stream(scope, send))
        finally:
            self._run.close()

    async def _send_stream(self, scope: Scope, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_output(scope["state"].get(SEND, send))
            await _send_text(send, self._writer.closing(self._run.generations), more=False)
        except ClientGoneError:
            scope["state"]["outcome"] = "client_gone"
        except RequestError as error:
            scope["state"]["outcome"] = "failed"
            await _send_text(send, self._writer.failure(error), more=False)

    async def _send_output(self, send: Send) -> None:
        updated, write = self._first, self._plain
        while True:
            if write is not None:
                text = write(updated[0])
                if text:
                    await _send_text(send, text, more=True)
            else:
                await self._send_paced(send, updated)
            if self._run.finished:
                return
            updated = await self._run.next_updates()

    async def _send_paced(self, send: Send, updated: list[Generation]) -> None:
        """Sends the output of several choices, or with log probabilities: it may be large."""
        pacer = Pacer()
        pieces: list[str] = []
        for generation in updated:
            # A generation that ended during an earlier pause has its end written already.
            if generation.index in self._ended:
                continue
            if generation.finish is not None:
                self._ended.add(generation.index)
            for piece in await self._writer.write_paced(generation, pacer):
                pieces.append(piece)
                if len(piece) > _LARGE_PIECE:
                    await _send_text(send, "".join(pieces), more=True)
                    pieces.clear()
                    await pacer.pause_if_due()
        if text := "".join(pieces):
            await _send_text(send, text, more=True)


def error_event(error: RequestError) -> str:
    """The event of an error in OpenAI's form."""
    return event(json_ascii(ApiError.of(error).body()))


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


async def _send_text(send: Send, text: str, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
