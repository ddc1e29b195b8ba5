"""From a body to a job: JSON, fields and bounds. Runs in the gateway or in a helper process."""

import pickle
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pagewire.errors import invalid
from pagewire.gateway.api.chat import ChatRequest, chat_request_model
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.unknown_fields import check_extras
from pagewire.gateway.api.validation import validate
from pagewire.gateway.models import ServedModel, find_model
from pagewire.v1 import inference_pb2 as pb

Route = Literal["chat", "completions"]

# A JSON string; at the end of the body also one without its closing quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
# Address space of a helper process: the interpreter with its libraries, and a parsed body.
_BASE_BYTES = 1 << 30
_BYTES_A_BODY_BYTE = 96


@dataclass(frozen=True, slots=True)
class HelperSetup:
    """What a helper process gets when it starts."""

    limits: BodyLimits
    max_body_bytes: int
    strict_fields: bool


class JobParser:
    """Parses bodies into jobs; with `strict_fields` it refuses unknown fields."""

    def __init__(self, limits: BodyLimits, strict_fields: bool = False) -> None:
        self._limits = limits
        self._strict_fields = strict_fields
        self._chat: type[ChatRequest] = chat_request_model(limits.max_messages)

    def parse(self, route: Route, body: bytes, models: Mapping[str, ServedModel]) -> Job:
        """The job of a body; RequestError names a field that is not valid.

        `models` has the served models.
        """
        limits = self._limits
        if route == "chat":
            _check_nodes(body, limits.chat_nodes, "send fewer messages, or raise --max-messages")
            chat = validate(self._chat, body)
            model = find_model(chat.model, models)
            served = models[model]
            chat.resolve_truncation(served.max_model_len, chat.given_max_tokens())
            job = chat.job(model, served, limits)
            return replace(job, ignored=check_extras(chat, self._strict_fields))
        _check_nodes(body, limits.max_json_nodes, "split it, or raise --max-json-nodes")
        completion = validate(CompletionRequest, body)
        model = find_model(completion.model, models)
        max_model_len = models[model].max_model_len
        completion.resolve_truncation(max_model_len, completion.given_max_tokens())
        job = completion.job(model, max_model_len)
        return replace(job, ignored=check_extras(completion, self._strict_fields))


def load_helper(setup: HelperSetup) -> Callable[[bytes], bytes]:
    """The function of a helper process, from a packed task to a packed job. Limits its memory."""
    max_bytes = _BASE_BYTES + _BYTES_A_BODY_BYTE * setup.max_body_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    parser = JobParser(setup.limits, setup.strict_fields)

    def compute(task: bytes) -> bytes:
        return _pack_job(parser.parse(*pickle.loads(task)))

    return compute


def pack_task(route: Route, body: bytes, models: Mapping[str, ServedModel]) -> bytes:
    """The arguments of `JobParser.parse`, for a helper process."""
    return pickle.dumps((route, body, dict(models)), pickle.HIGHEST_PROTOCOL)


def unpack_job(data: bytes) -> Job:
    """A helper's job. The prompts stay serialized, so their size costs no time."""
    job, requests = pickle.loads(data)
    assert isinstance(job, Job)
    return replace(job, requests=[pb.GenerateRequest.FromString(each) for each in requests])


def _pack_job(job: Job) -> bytes:
    requests = [request.SerializeToString() for request in job.requests]
    return pickle.dumps((replace(job, requests=[]), requests), pickle.HIGHEST_PROTOCOL)


def _check_nodes(body: bytes, max_nodes: int, remedy: str) -> None:
    """Refuses a body with too many JSON values before memory is taken for them."""
    if node_bound(body) <= max_nodes:
        return
    nodes = node_bound(_STRING.sub(b"", body))
    if nodes > max_nodes:
        raise invalid(
            "",
            f"the request body has {nodes} JSON values; at most {max_nodes} are allowed: {remedy}",
        )


def node_bound(body: bytes) -> int:
    """An upper bound on the JSON values of a body: each but the first follows one of these."""
    return sum(map(body.count, (b",", b"[", b"{"))) + 1
