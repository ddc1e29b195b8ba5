"""Answers as server-sent events."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.errors import RequestError
from pagewire.gateway.api.formatting import Reply, compact, new_logprobs, usage
from pagewire.gateway.errors import ApiError, ClientGoneError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.turns import Turns
from pagewire.gateway.http.paced_json import TOKENS_A_PIECE, paced_logprobs, spliced
from pagewire.gateway.http.run import Run

DONE = "data: [DONE]\n\n"
_LARGE_PIECE = 4096  # characters
_MARK = "\x00"  # stands for the text while a chunk's surroundings are formatted


class ChunkWriter:
    """The chunks of one answer as text. What surrounds a choice's text is formatted once."""

    def __init__(self, reply: Reply, include_usage: bool) -> None:
        self._reply = reply
        self._usage = {"usage": None} if include_usage else {}
        self._around: dict[int, tuple[str, str]] = {}

    async def write_paced(self, generation: Generation, turns: Turns) -> list[str]:
        """The same as `write`, in pieces and with turns of the loop between them."""
        log = generation.logprobs
        if log is None or log.waiting <= TOKENS_A_PIECE:
            text = self.write(generation)
            await turns.give()
            return [text]
        text, finish = generation.take_text(), generation.finish
        if not text and finish is None:
            return []
        opening = self._opening(generation.index)
        choice = self._news(generation, text)
        logprobs = await paced_logprobs(self._reply, log, turns, compact)
        written = spliced({**choice, "logprobs": None}, "logprobs", logprobs, compact)
        chunk = self._reply.envelope.wrap([], **self._usage)
        return [
            f"{opening}data: ",
            *spliced(chunk, "choices", ["[", *written, "]"], compact),
            "\n\n",
        ]

    def write(self, generation: Generation) -> str:
        """The events for a generation's news: its opening, its text, its end."""
        text = generation.take_text()
        if not text and generation.finish is None:
            return ""
        if generation.finish is not None or generation.logprobs is not None:
            opening = self._opening(generation.index)
            return opening + self._with_logprobs(generation, self._news(generation, text))
        around = self._around.get(generation.index)
        if around is None:
            opening = self._opening(generation.index)
            around = self._around[generation.index]
            return f"{opening}{around[0]}{json.dumps(text)}{around[1]}"
        return f"{around[0]}{json.dumps(text)}{around[1]}"

    def usage(self, generations: Sequence[Generation]) -> str:
        """The event of token counts, which comes after all choices have ended."""
        return event(compact(self._reply.envelope.wrap([], usage=usage(generations))))

    def _opening(self, index: int) -> str:
        """The opening of a choice if it has not been written yet."""
        if index in self._around:
            return ""
        piece = self._event(self._reply.piece(index, _MARK))
        before, _, after = piece.partition(compact(_MARK))
        self._around[index] = (before, after)
        choice = self._reply.opening(index)
        return self._event(choice) if choice is not None else ""

    def _news(self, generation: Generation, text: str) -> dict[str, Any]:
        if generation.finish is None:
            return self._reply.piece(generation.index, text)
        return self._reply.ending(generation.index, text, generation.finish)

    def _with_logprobs(self, generation: Generation, choice: dict[str, Any]) -> str:
        return self._event({**choice, "logprobs": new_logprobs(self._reply, generation)})

    def _event(self, choice: dict[str, object]) -> str:
        return event(compact(self._reply.envelope.wrap([choice], **self._usage)))


class EventStream(Response):
    """Writes the news of a run as they come; `first` are those that were awaited already."""

    media_type = "text/event-stream"

    def __init__(
        self, run: Run, first: list[Generation], reply: Reply, include_usage: bool
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._first = first
        self._writer = ChunkWriter(reply, include_usage)
        self._include_usage = include_usage
        alone = len(run.generations) == 1
        self._plain = alone and run.generations[0].logprobs is None
        self._ended: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream. An error after its beginning becomes the last event."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_news(send)
            last = self._writer.usage(self._run.generations) if self._include_usage else ""
            await _send_text(send, last + DONE, more=False)
        except ClientGoneError:
            scope["state"]["outcome"] = "client_gone"
        except RequestError as error:
            scope["state"]["outcome"] = "failed"
            await _send_text(send, event(compact(ApiError.of(error).body())), more=False)
        finally:
            self._run.close()

    async def _send_news(self, send: Send) -> None:
        news, write = self._first, self._writer.write
        while True:
            if self._plain:
                text = write(news[0])
                if text:
                    await _send_text(send, text, more=True)
            else:
                await self._send_paced(send, news)
            if self._run.finished:
                return
            news = await self._run.news()

    async def _send_paced(self, send: Send, news: list[Generation]) -> None:
        """News of several choices, or with log probabilities: in turns, as they may be large."""
        turns = Turns()
        waiting: list[str] = []
        for generation in news:
            if generation.index in self._ended:  # during an earlier turn: it is news once more
                continue
            if generation.finish is not None:
                self._ended.add(generation.index)
            for piece in await self._writer.write_paced(generation, turns):
                waiting.append(piece)
                if len(piece) > _LARGE_PIECE:
                    await _send_text(send, "".join(waiting), more=True)
                    waiting.clear()
                    await turns.give()
        if text := "".join(waiting):
            await _send_text(send, text, more=True)


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


async def _send_text(send: Send, text: str, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
