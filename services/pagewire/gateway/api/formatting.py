"""What the answers of chat and completions have in common."""

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import TokenLogprobs
from pagewire.v1 import inference_pb2 as pb

MIN_LOGPROB = -9999.0
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """The keys around the choices of every body and chunk of one answer."""

    kind: str  # the start of the id: "cmpl" or "chatcmpl"
    object: str
    model: str
    id: str = field(init=False)
    created: int = field(init=False)  # Unix time, seconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.kind}-{uuid.uuid4().hex}")
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


class Reply(Protocol):
    """How one answer is written. A choice's index is its prompt's index times n, and on."""

    @property
    def envelope(self) -> Envelope:
        """What surrounds the choices."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that comes before a choice's text, if there is one."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk of text."""

    def ending(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The choice of the last chunk, with what text is left."""

    def whole(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """What a choice says of the log probabilities of some of its tokens."""


def ended_by(finish: pb.Finish) -> dict[str, Any]:
    """`finish_reason`, and as `stop_reason` the stop string or token at fault, null if none."""
    stop: str | int | None = None
    if finish.HasField("stop_string"):
        stop = finish.stop_string
    elif finish.HasField("stop_token_id"):
        stop = finish.stop_token_id
    return {"finish_reason": _REASONS[finish.reason], "stop_reason": stop}


def usage(generations: Iterable[Generation]) -> dict[str, Any]:
    """Token counts over all prompts of an answer, each prompt counted once."""
    ended = [(g.prompt, g.finish.usage) for g in generations if g.finish is not None]
    counts = [count for _, count in ended]
    # Of several choices the first is the one whose prompt was computed.
    prompts = dict(reversed(ended)).values()
    prompt = sum(count.prompt_tokens for count in prompts)
    completion = sum(count.completion_tokens for count in counts)
    cached = sum(count.cached_tokens for count in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def new_logprobs(reply: Reply, generation: Generation) -> dict[str, Any] | None:
    """Those of the tokens since the last call; None if there are none or none are wanted."""
    tokens = generation.logprobs.take() if generation.logprobs is not None else []
    return reply.logprobs(tokens) if tokens else None


def json_logprob(logprob: float) -> float:
    """A log probability as JSON can say it, which has no infinity: -9999, as vLLM does."""
    return max(logprob, MIN_LOGPROB)


def compact(value: Any) -> str:
    """JSON in ASCII without spaces."""
    return json.dumps(value, separators=(",", ":"))
