"""From a body to a job: JSON, vocabulary and bounds. Runs in the gateway or in a helper of it."""

import pickle
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pagewire.errors import invalid
from pagewire.gateway.api.chat import ChatRequest, chat_vocabulary
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.validation import parse
from pagewire.gateway.models import model_of
from pagewire.v1 import inference_pb2 as pb

Route = Literal["chat", "completions"]

# A string, or what is left of one that does not end.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
# Address space of a helper: the interpreter with its libraries, and what a body may become.
_BASE_BYTES = 1 << 30
_BYTES_A_BODY_BYTE = 96


@dataclass(frozen=True, slots=True)
class HelperSetup:
    """What a helper is told once."""

    limits: BodyLimits
    max_body_bytes: int


class JobParser:
    """Makes jobs of bodies."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._chat: type[ChatRequest] = chat_vocabulary(limits.max_messages)

    def job(self, route: Route, body: bytes, models: Mapping[str, int]) -> Job:
        """The work that a body asks for; RequestError names the field at fault.

        `models` are those served, with their lengths.
        """
        limits = self._limits
        if route == "chat":
            _check_nodes(body, limits.chat_nodes, "send fewer messages, or raise --max-messages")
            chat = parse(self._chat, body)
            return chat.job(model_of(chat.model, models), limits)
        _check_nodes(body, limits.max_json_nodes, "split it, or raise --max-json-nodes")
        completion = parse(CompletionRequest, body)
        model = model_of(completion.model, models)
        return completion.job(model, models[model])


def load_helper(setup: HelperSetup) -> Callable[[bytes], bytes]:
    """What a helper process computes: a packed task to a packed job."""
    most = _BASE_BYTES + _BYTES_A_BODY_BYTE * setup.max_body_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    parser = JobParser(setup.limits)

    def compute(task: bytes) -> bytes:
        return _pack_job(parser.job(*pickle.loads(task)))

    return compute


def pack_task(route: Route, body: bytes, models: Mapping[str, int]) -> bytes:
    """What a helper is to compute."""
    return pickle.dumps((route, body, dict(models)), pickle.HIGHEST_PROTOCOL)


def unpack_job(data: bytes) -> Job:
    """A helper's answer, in time that does not depend on the size of its prompts."""
    job, requests = pickle.loads(data)
    assert isinstance(job, Job)
    return replace(job, requests=[pb.GenerateRequest.FromString(each) for each in requests])


def _pack_job(job: Job) -> bytes:
    requests = [request.SerializeToString() for request in job.requests]
    return pickle.dumps((replace(job, requests=[]), requests), pickle.HIGHEST_PROTOCOL)


def _check_nodes(body: bytes, most: int, remedy: str) -> None:
    """Refuses a body with too many values before any of them takes memory."""
    if most_nodes(body) <= most:
        return
    nodes = most_nodes(_STRING.sub(b"", body))
    if nodes > most:
        raise invalid(
            "", f"the request body has {nodes} JSON values; at most {most} are allowed: {remedy}"
        )


def most_nodes(body: bytes) -> int:
    """As many values as JSON has at most: each but the first follows one of these."""
    return sum(map(body.count, (b",", b"[", b"{"))) + 1
