"""The stream of a message in Anthropic's order: each content block starts, grows and stops."""

import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.gateway.api.events import AnswerForm, named_event
from pagewire.gateway.api.formatting import json_ascii
from pagewire.gateway.api.messages.errors import error_body
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

# The key of an input that is not a JSON object.
INVALID = "INVALID_JSON"
_EMPTY = json_ascii("")


@dataclass(frozen=True, slots=True)
class MessageForm(AnswerForm):
    """The form of an answer."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    given_id: str | None = None

    @property
    def request_id(self) -> str:
        """The id given with the request, otherwise the id of the message."""
        return self.given_id or self.id

    def under(self, request_id: str) -> "MessageForm":
        """The form whose errors name a given id."""
        return replace(self, given_id=request_id)

    def events(self, streamed: bool) -> "MessageEvents":
        """The events of one answer."""
        return MessageEvents(self, streamed)


@dataclass(slots=True)
class _Block:
    """A content block while it grows. Its kind is text, thinking or tool_use."""

    kind: str
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    id: str = ""
    complete: bool = False  # a call whose end has arrived

    def start(self) -> str:
        """Its JSON without content."""
        return self._json(_EMPTY, "{}")

    def whole(self) -> str:
        """Its JSON. The input of a call that was cut off may not be an object: then it is empty."""
        text = "".join(self.pieces)
        if self.kind == "tool_use":
            return self._json(_EMPTY, _input_of(text) if self.complete else "{}")
        return self._json(json_ascii(text), "{}")

    def delta(self, piece: str) -> str:
        """The JSON of a piece."""
        if self.kind == "text":
            return f'{{"type":"text_delta","text":{json_ascii(piece)}}}'
        if self.kind == "thinking":
            return f'{{"type":"thinking_delta","thinking":{json_ascii(piece)}}}'
        return f'{{"type":"input_json_delta","partial_json":{json_ascii(piece)}}}'

    @property
    def signature(self) -> str:
        """A signature of thinking. Clients send it back; it must not be empty."""
        return hashlib.sha256("".join(self.pieces).encode(errors="replace")).hexdigest()

    def _json(self, text: str, given: str) -> str:
        if self.kind == "text":
            return f'{{"type":"text","text":{text}}}'
        if self.kind == "thinking":
            signature = self.signature if self.pieces else ""
            return f'{{"type":"thinking","thinking":{text},"signature":"{signature}"}}'
        return (
            f'{{"type":"tool_use","id":"{self.id}","name":{json_ascii(self.name)},"input":{given}}}'
        )


class MessageEvents:
    """Turns the events of one output into those of a message; see `AnswerEvents`."""

    def __init__(self, form: MessageForm, streamed: bool) -> None:
        self._form = form
        self._streamed = streamed
        self._written: list[str] = []
        self._done: list[str] = []  # the JSON of complete blocks
        self._open: _Block | None = None
        self._has_calls = False  # with calls: whether the latest one is complete
        self._body = ""

    def begin(self, prompt_tokens: int) -> list[str]:
        """The message without content, and a ping."""
        if self._streamed:
            message = self._message(None, None, _usage(pb.Usage(prompt_tokens=prompt_tokens)))
            self._write("message_start", f'"message":{message}')
            self._write("ping", "")
        return self._take()

    def logprobs(self, tokens: list[TokenLogprobs]) -> None:
        """No message has log probabilities."""
        raise AssertionError("no request asks for them")

    def feed(self, events: Iterable[Event]) -> list[str]:
        """The events of new output."""
        for event in events:
            if isinstance(event, Content):
                self._add("text", event.text)
            elif isinstance(event, Reasoning):
                self._add("thinking", event.text)
            elif isinstance(event, CallBegin):
                self._begin(_Block("tool_use", event.name, id=f"toolu_{uuid.uuid4().hex[:24]}"))
            elif isinstance(event, CallArguments):
                self._add("tool_use", event.json)
            elif isinstance(event, CallEnd):
                self._end(complete=True)
        return self._take()

    def finish(self, finish: pb.Finish, reasoning_tokens: int | None) -> list[str]:
        """The end of the open block, the reason and the usage."""
        self._end()
        reason, sequence = self._stop_reason(finish)
        usage = _usage(finish.usage, reasoning_tokens)
        self._body = self._message(reason, sequence, usage)
        if self._streamed:
            delta = json_ascii({"stop_reason": reason, "stop_sequence": sequence})
            self._write("message_delta", f'"delta":{delta},"usage":{usage}')
            self._write("message_stop", "")
        return self._take()

    def fail(self, error: ApiError) -> list[str]:
        """The error, as the last event."""
        body = error_body(error, self._form.request_id)
        return [*self._take(), named_event("error", json_ascii(body))]

    def body(self) -> list[str]:
        """The JSON of the message."""
        return [self._body]

    def _stop_reason(self, finish: pb.Finish) -> tuple[str, str | None]:
        if finish.reason == pb.FINISH_REASON_LENGTH:
            return "max_tokens", None
        if finish.HasField("stop_string"):
            return "stop_sequence", finish.stop_string
        return "tool_use" if self._has_calls else "end_turn", None

    def _message(self, reason: str | None, sequence: str | None, usage: str) -> str:
        head = json_ascii(
            {
                "id": self._form.id,
                "type": "message",
                "role": "assistant",
                "model": self._form.model,
                "stop_reason": reason,
                "stop_sequence": sequence,
            }
        )
        return f'{head[:-1]},"content":[{",".join(self._done)}],"usage":{usage}}}'

    def _add(self, kind: str, piece: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(_Block(kind))
        assert self._open is not None
        self._open.pieces.append(piece)
        if self._streamed:
            self._write_delta(self._open.delta(piece))

    def _begin(self, block: _Block) -> None:
        self._end()
        self._open = block
        if self._streamed:
            place = f'"index":{len(self._done)}'
            self._write("content_block_start", f'{place},"content_block":{block.start()}')

    def _end(self, complete: bool = False) -> None:
        block = self._open
        if block is None:
            return
        block.complete = complete
        if block.kind == "tool_use":
            self._has_calls = complete
        if self._streamed:
            if block.kind == "thinking":
                self._write_delta(f'{{"type":"signature_delta","signature":"{block.signature}"}}')
            self._write("content_block_stop", f'"index":{len(self._done)}')
        self._done.append(block.whole())
        self._open = None

    def _write_delta(self, delta: str) -> None:
        self._write("content_block_delta", f'"index":{len(self._done)},"delta":{delta}')

    def _write(self, name: str, fields: str) -> None:
        data = f'{{"type":"{name}"{"," if fields else ""}{fields}}}'
        self._written.append(named_event(name, data))

    def _take(self) -> list[str]:
        written, self._written = self._written, []
        return written


def _input_of(arguments: str) -> str:
    """The JSON of a call's input. Text that is not a JSON object is kept as a string."""
    try:
        given = json.loads(arguments or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        given = None
    return arguments or "{}" if isinstance(given, dict) else json_ascii({INVALID: arguments})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _usage(usage: pb.Usage, thinking: int | None = None) -> str:
    """The usage as JSON: Anthropic counts tokens read from a cache separately."""
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if thinking is not None:
        counts["output_tokens_details"] = {"thinking_tokens": thinking}
    return json_ascii(counts)
