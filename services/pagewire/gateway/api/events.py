"""The events of answers that stream named events, each with a JSON object."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from pagewire.gateway.api.formatting import json_ascii
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation.logprob_log import TokenLogprobs
from pagewire.gateway.parsers.events import Event
from pagewire.v1 import inference_pb2 as pb


class AnswerEvents(Protocol):
    """One answer of one generation: its stream, and the object that its stream adds up to.

    The methods return pieces that join to whole server-sent events, and nothing if the answer is
    not streamed.
    """

    def begin(self, prompt_tokens: int) -> list[str]:
        """The events before the output. `prompt_tokens` is 0 if the number is not known yet."""
        ...

    def feed(self, events: Iterable[Event]) -> list[str]:
        """New output."""
        ...

    def logprobs(self, tokens: list[TokenLogprobs]) -> None:
        """The log probabilities of the text that follows, if the request asks for them."""
        ...

    def finish(self, finish: pb.Finish, reasoning_tokens: int | None) -> list[str]:
        """The end of the output and of the stream."""
        ...

    def fail(self, error: ApiError) -> list[str]:
        """The end of a stream that fails."""
        ...

    def body(self) -> list[str]:
        """The JSON of the answer as a whole, in pieces, after `finish`."""
        ...


class AnswerForm(ABC):
    """The form of an answer, as its request defines it. It can be pickled."""

    __slots__ = ()

    @property
    @abstractmethod
    def request_id(self) -> str:
        """The id of the request in logs, which is the id of the answer."""

    def under(self, request_id: str) -> "AnswerForm":
        """The form for a request with its own id; it differs only if errors name this id."""
        return self

    @abstractmethod
    def events(self, streamed: bool) -> AnswerEvents:
        """The events of one answer in this form."""


def named_event(name: str, data: str) -> str:
    """A server-sent event; `data` is JSON."""
    return f"event: {name}\ndata: {data}\n\n"


def members(fields: dict[str, Any]) -> str:
    """The JSON of an object's fields without the braces, so that others can be added."""
    return json_ascii(fields)[1:-1]
