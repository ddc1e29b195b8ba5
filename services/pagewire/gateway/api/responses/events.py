"""The stream of a response, in OpenAI's order: each item is added, grows and is done."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.gateway.api.chat_output import new_call_id
from pagewire.gateway.api.events import AnswerForm, named_event
from pagewire.gateway.api.responses.output_items import (
    CallItem,
    ItemEvent,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from pagewire.gateway.api.responses.response import (
    ResponseHead,
    Status,
    error_object,
    usage_field,
)
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation.logprob_log import TokenLogprobs
from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class ResponseForm(AnswerForm):
    """The form of a response. With `short_ids`, ids of calls are short, as some models need."""

    head: ResponseHead
    short_ids: bool = False

    @property
    def request_id(self) -> str:
        """The id of the response."""
        return self.head.id

    def events(self, streamed: bool) -> "ResponseEvents":
        """The events of one answer."""
        return ResponseEvents(self.head, streamed, self.short_ids)


class ResponseEvents:
    """Turns the events of one output into those of a response; see `AnswerEvents`.

    At most one item is open at a time: the next item ends it.
    """

    def __init__(self, head: ResponseHead, streamed: bool, short_ids: bool) -> None:
        self._head = head
        self._streamed = streamed
        self._short_ids = short_ids
        self._sequence = 0
        self._written: list[str] = []
        self._done: list[str] = []  # the JSON of complete items
        self._open: OutputItem | None = None
        self._body: list[str] = []

    def begin(self, prompt_tokens: int) -> list[str]:
        """The response without output."""
        if self._streamed:
            state = self._head.state("in_progress")
            self._write_state("response.created", state)
            self._write_state("response.in_progress", state)
        return self._take()

    def feed(self, events: Iterable[Event]) -> list[str]:
        """The events of new output."""
        for event in events:
            if isinstance(event, Content):
                if not isinstance(self._open, MessageItem):
                    self._begin(MessageItem(_new_id("msg")))
                self._add(event.text)
            elif isinstance(event, Reasoning):
                if not isinstance(self._open, ReasoningItem):
                    self._begin(ReasoningItem(_new_id("rs")))
                self._add(event.text)
            elif isinstance(event, CallBegin):
                call_id = new_call_id(self._short_ids)
                self._begin(CallItem(_new_id("fc"), call_id, event.name))
            elif isinstance(event, CallArguments):
                self._add(event.json)
            elif isinstance(event, CallEnd):
                self._end("completed")
        return self._take()

    def logprobs(self, tokens: list[TokenLogprobs]) -> None:
        """The log probabilities of the message's text that follows; only messages have them."""
        if self._open is None:
            self._begin(MessageItem(_new_id("msg")))
        assert isinstance(self._open, MessageItem)
        self._open.add_logprobs(tokens)

    def finish(self, finish: pb.Finish, reasoning_tokens: int | None) -> list[str]:
        """The end of the open item, and the complete response."""
        status: Status = "completed"
        if finish.reason != pb.FINISH_REASON_STOP:
            status = "incomplete"
        if not self._done and self._open is None:
            self._begin(MessageItem(_new_id("msg")))  # an empty answer is an empty message
        # An open call was cut off, also if a stop string ended the output.
        self._end("incomplete" if isinstance(self._open, CallItem) else status)
        usage = usage_field(finish.usage, reasoning_tokens)
        self._body = self._head.state(status, self._done, usage)
        if self._streamed:
            self._write_state(f"response.{status}", self._body)
        return self._take()

    def fail(self, error: ApiError) -> list[str]:
        """The response with the error, and the items so far."""
        self._end("incomplete")
        state = self._head.state("failed", self._done, error=error_object(error))
        self._write_state("response.failed", state)
        return self._take()

    def body(self) -> list[str]:
        """The JSON of the response, in pieces."""
        return self._body

    def _begin(self, item: OutputItem) -> None:
        self._end("completed")
        self._open = item
        if self._streamed:
            self._write_all(item.added())

    def _add(self, piece: str) -> None:
        assert self._open is not None
        event = self._open.add(piece)
        if self._streamed:
            self._write_all([event])

    def _end(self, status: str) -> None:
        if self._open is None:
            return
        if self._streamed:
            self._write_all(self._open.done(status))
        self._done.append(self._open.whole(status))
        self._open = None

    def _write_all(self, events: list[ItemEvent]) -> None:
        for name, fields in events:
            self._write(name, f'"output_index":{len(self._done)},{fields}')

    def _write_state(self, name: str, state: list[str]) -> None:
        before, after = named_event(name, f'{self._head_of(name)},"response":\0}}').split("\0")
        self._written += [before, *state, after]

    def _write(self, name: str, fields: str) -> None:
        self._written.append(named_event(name, f"{self._head_of(name)},{fields}}}"))

    def _head_of(self, name: str) -> str:
        """The beginning of the JSON of the next event."""
        number = self._sequence
        self._sequence += 1
        return f'{{"type":"{name}","sequence_number":{number}'

    def _take(self) -> list[str]:
        written, self._written = self._written, []
        return written


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
