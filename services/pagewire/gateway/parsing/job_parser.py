"""From a body to a job: JSON, fields and bounds. Runs in the gateway or in a helper process."""

import pickle
import re
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagewire.errors import invalid
from pagewire.gateway.api.chat import ChatRequest, chat_request_model
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.messages.request import MessagesRequest, messages_request_model
from pagewire.gateway.api.pooling.embeddings import EmbeddingRequest
from pagewire.gateway.api.pooling.scores import RerankRequest, ScoreRequest
from pagewire.gateway.api.responses.request import ResponsesRequest, responses_request_model
from pagewire.gateway.api.tokenization import (
    DetokenizeRequest,
    TextCall,
    TokenizeRequest,
    tokenize_request_model,
)
from pagewire.gateway.api.validation import Model, validate
from pagewire.gateway.models import Models, find_model
from pagewire.gateway.parsing.unknown_fields import check_extras
from pagewire.helpers.pool import Bytes
from pagewire.v1 import inference_pb2 as pb

Route = Literal["chat", "completions", "responses", "messages", "embeddings", "score", "rerank"]
TextRoute = Literal["tokenize", "detokenize", "count_tokens"]
Task = Literal["job", "text_call", "text_body"]

# Requests whose inputs have one result each, and no text.
_POOLED: dict[Route, type[EmbeddingRequest] | type[ScoreRequest] | type[RerankRequest]] = {
    "embeddings": EmbeddingRequest,
    "score": ScoreRequest,
    "rerank": RerankRequest,
}
# A JSON string; at the end of the body also one without its closing quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
# Address space of a helper process: the interpreter with its libraries, and a parsed body.
_BASE_BYTES = 1 << 30
_BYTES_A_BODY_BYTE = 96
_HEAD_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class HelperSetup:
    """The arguments of a helper process at its start."""

    limits: BodyLimits
    max_body_bytes: int
    strict_fields: bool


class JobParser:
    """Parses bodies into jobs; with `strict_fields` it refuses fields without an effect."""

    def __init__(self, limits: BodyLimits, strict_fields: bool = False) -> None:
        self._limits = limits
        self._strict_fields = strict_fields
        self._tokenize: type[TokenizeRequest] = tokenize_request_model(limits.max_messages)
        self._messages: type[MessagesRequest] = messages_request_model(limits.max_messages)
        self._conversations: dict[
            Route, type[ChatRequest] | type[ResponsesRequest] | type[MessagesRequest]
        ] = {
            "chat": chat_request_model(limits.max_messages),
            "responses": responses_request_model(limits.max_messages),
            "messages": self._messages,
        }

    def parse(self, route: Route, body: bytes, models: Models) -> Job:
        """The job of a body; RequestError names a field that is not valid."""
        if route == "completions":
            completion = self._read(CompletionRequest, body, has_messages=False)
            model, served = find_model(completion.model, models)
            max_model_len = served.max_model_len
            completion.resolve_truncation(max_model_len, completion.given_max_tokens())
            job = completion.job(model, max_model_len, self._limits.max_prompt_logprobs)
            return replace(job, ignored=check_extras(completion, self._strict_fields))
        if route in _POOLED:
            pooled = self._read(_POOLED[route], body, has_messages=False)
            model, served = find_model(pooled.model, models)
            job = pooled.job(model, served.max_model_len)
            return replace(job, ignored=check_extras(pooled, self._strict_fields))
        request = self._read(self._conversations[route], body)
        model, served = find_model(request.model, models)
        request.resolve_truncation(served.max_model_len, request.given_max_tokens())
        job = request.job(model, served, self._limits)
        return replace(job, ignored=check_extras(request, self._strict_fields, job.ignored))

    def text_call(self, route: TextRoute, body: bytes, models: Models) -> TextCall:
        """The call of a scheduler that a body asks for; RequestError names a wrong field."""
        request: TokenizeRequest | MessagesRequest | DetokenizeRequest
        if route == "tokenize":
            request = self._read(self._tokenize, body)
            call = request.call(*find_model(request.model, models), self._limits)
        elif route == "count_tokens":
            request = self._read(self._messages, body)
            call = request.count(*find_model(request.model, models), self._limits)
        else:
            request = self._read(DetokenizeRequest, body, has_messages=False)
            call = request.call(find_model(request.model, models)[0])
        return replace(call, ignored=check_extras(request, self._strict_fields, call.ignored))

    def _read(self, model: type[Model], body: bytes, has_messages: bool = True) -> Model:
        limits = self._limits
        if has_messages:
            _check_nodes(body, limits.chat_nodes, "send fewer messages, or raise --max-messages")
        else:
            _check_nodes(body, limits.max_json_nodes, "split it, or raise --max-json-nodes")
        return validate(model, body)


def load_helper(setup: HelperSetup) -> Callable[[bytes], bytes]:
    """The function of a helper process, from a packed task to its result. Limits the memory."""
    max_bytes = _BASE_BYTES + _BYTES_A_BODY_BYTE * setup.max_body_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    parser = JobParser(setup.limits, setup.strict_fields)

    def compute(task: bytes) -> bytes:
        (size,) = _HEAD_SIZE.unpack_from(task)
        begin = _HEAD_SIZE.size + size
        kind, arguments = pickle.loads(memoryview(task)[_HEAD_SIZE.size : begin])
        data = task[begin:]
        if kind == "job":
            route, models = arguments
            return _pack_job(parser.parse(route, data, models))
        if kind == "text_call":
            route, models = arguments
            call = parser.text_call(route, data, models)
            return pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        assert kind == "text_body"
        call, max_model_len = arguments
        return bytes(call.body(data, max_model_len))

    return compute


def pack_task(kind: Task, *arguments: Any) -> bytes:
    """The head of a task for a helper; its data follows.

    For "job" and "text_call" the data is a body, and the arguments are the route and the models.
    For "text_body" it is a response, and they are its TextCall and the model's `max_model_len`.
    """
    head = pickle.dumps((kind, arguments), pickle.HIGHEST_PROTOCOL)
    return _HEAD_SIZE.pack(len(head)) + head


def unpack_call(data: Bytes) -> TextCall:
    """A helper's call."""
    call = pickle.loads(data)
    assert isinstance(call, TextCall)
    return call


def unpack_job(data: Bytes) -> Job:
    """A helper's job. The prompts stay serialized, so their size does not matter."""
    job, requests = pickle.loads(data)
    assert isinstance(job, Job)
    return replace(job, requests=[pb.GenerateRequest.FromString(each) for each in requests])


def _pack_job(job: Job) -> bytes:
    requests = [request.SerializeToString() for request in job.requests]
    return pickle.dumps((replace(job, requests=[]), requests), pickle.HIGHEST_PROTOCOL)


def _check_nodes(body: bytes, max_nodes: int, remedy: str) -> None:
    """Refuses a body with too many JSON values before they use memory."""
    if node_bound(body) <= max_nodes:
        return
    nodes = node_bound(_STRING.sub(b"", body))
    if nodes > max_nodes:
        raise invalid(
            "",
            f"the request body has {nodes} JSON values; at most {max_nodes} are allowed: {remedy}",
        )


def node_bound(body: Bytes) -> int:
    """An upper bound on the JSON values of a body: all but the first follow a counted character."""
    return sum(map(body.count, (b",", b"[", b"{"))) + 1
