"""What endpoints share to write a job's output as JSON."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs
from pagewire.gateway.generation.prompt_log import ScoredToken
from pagewire.packing import Float32Array
from pagewire.v1 import inference_pb2 as pb

Form = TypeVar("Form", bound="PooledForm")

MIN_LOGPROB = -9999.0
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """The keys beside `choices` in every body and chunk of one answer."""

    kind: str  # the beginning of the id: "cmpl" or "chatcmpl"
    object: str
    model: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    id: str = field(init=False)
    created: int = field(init=False)  # Unix time, seconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.kind}-{self.request_id}")
        object.__setattr__(self, "created", int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body or chunk with these choices."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


@dataclass(frozen=True, slots=True)
class PooledForm(ABC):
    """The form of an answer that has one vector for each input. It can be pickled."""

    # The field with the results.
    results_field: ClassVar[str] = "data"

    envelope: Envelope

    def under(self: Form, envelope: Envelope) -> Form:
        """The same form with another envelope."""
        return replace(self, envelope=envelope)

    @abstractmethod
    def entries(self, vectors: Sequence[Float32Array]) -> Iterator[str]:
        """The JSON of each result, from the vectors of the inputs in order."""

    def fields(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The body, with an empty value in place of the results."""
        return {
            "id": self.envelope.id,
            "object": self.envelope.object,
            "created": self.envelope.created,
            "model": self.envelope.model,
            self.results_field: None,
            "usage": usage,
        }


class Formatter(Protocol):
    """Formats the choices of one answer. Indices increase prompt by prompt, with n for each."""

    # Whether `prompt_logprobs` are in each choice, and not in the answer as a whole.
    prompt_logprobs_in_choices: ClassVar[bool]

    @property
    def envelope(self) -> Envelope:
        """The keys beside the choices."""

    @property
    def stop_token_ids(self) -> Collection[int]:
        """The stop tokens of the request, which `stop_reason` may name."""

    def under(self, envelope: Envelope) -> "Formatter":
        """The same formatter with another envelope."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in the chunk before its text; None if there is no such chunk."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice in a chunk of text."""

    def ending(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The choice in its last chunk, with the remaining text."""

    def whole(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """The log probabilities of some tokens of a choice."""


def ended_by(finish: pb.Finish, stop_token_ids: Collection[int]) -> dict[str, Any]:
    """`finish_reason`, and `stop_reason`: the stop string, or the token if it is one of
    the request's `stop_token_ids`. null for the model's own end, as in vLLM."""
    stop: str | int | None = None
    if finish.HasField("stop_string"):
        stop = finish.stop_string
    elif finish.HasField("stop_token_id") and finish.stop_token_id in stop_token_ids:
        stop = finish.stop_token_id
    return {"finish_reason": _REASONS[finish.reason], "stop_reason": stop}


def usage(generations: Iterable[Generation], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """The token counts of an answer; each prompt counts once, each candidate's output too.

    `reasoning_tokens` is None if their number is not known.
    """
    ended = [(g.prompt_index, g.finish.usage) for g in generations if g.finish is not None]
    counts = [count for _, count in ended]
    # The first candidate computed the prompt; the others found it in the cache.
    prompts = dict(reversed(ended)).values()
    prompt = sum(count.prompt_tokens for count in prompts)
    completion = sum(count.completion_tokens for count in counts)
    cached = sum(count.cached_tokens for count in prompts)
    counted = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    if any(count.HasField("accepted_prediction_tokens") for count in counts):
        for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
            details[name] = sum(getattr(count, name) for count in counts)
    if details:
        counted["completion_tokens_details"] = details
    return counted


def new_logprobs(formatter: Formatter, generation: Generation) -> dict[str, Any] | None:
    """The log probabilities since the last call; None if there are none or none were requested."""
    tokens = generation.logprobs.take() if generation.logprobs is not None else []
    return formatter.logprobs(tokens) if tokens else None


def json_logprob(logprob: float | None) -> float | None:
    """A log probability for JSON, which has no infinity: at least -9999, as in vLLM."""
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def json_prompt_logprobs(tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
    """Entries of `prompt_logprobs` in vLLM's form: by token id, the prompt's own token first."""
    entries = []
    for each in tokens:
        entry = {str(each.token.token_id): _ranked(each.token, each.rank)}
        for rank, candidate in enumerate(each.top, start=1):
            entry.setdefault(str(candidate.token_id), _ranked(candidate, rank))
        entries.append(entry)
    return entries


def _ranked(candidate: Candidate, rank: int) -> dict[str, Any]:
    return {
        "logprob": json_logprob(candidate.logprob),
        "rank": rank,
        "decoded_token": candidate.text,
    }


def json_utf8(value: Any) -> str:
    """JSON without spaces, in which text is not escaped more than it must be."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_ascii(value: Any) -> str:
    """JSON without spaces, in ASCII."""
    return json.dumps(value, separators=(",", ":"))
