"""Requests without output: which models accept them, and which fields they may have."""

from pagewire.errors import invalid
from pagewire.limits import MAX_NAME_LENGTH
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.core.sequence import Sampling
from pagewire.scheduler.requests.parsing import ParsedRequest
from pagewire.scheduler.requests.prompt import (
    ModelLimits,
    RequestTokens,
    no_room,
    tokenize_request,
)
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.worker_info import PROTO_TASKS
from pagewire.v1 import inference_pb2 as pb

# By task: what the model does, and the endpoints for it.
_OFFERS = {
    "generate": ("generates text", "/v1/chat/completions or /v1/completions"),
    "embed": ("gives embeddings", "/v1/embeddings"),
    "score": ("scores pairs", "/v1/score or /v1/rerank"),
}
_ALLOWED = frozenset(
    {
        "request_id",
        "model",
        "prompt",
        "prompt_token_ids",
        "pair",
        "pooling",
        "priority",
        "cache_salt",
        "deadline_ms",
        "tenant",
        "truncate_prompt_tokens",
        "keep_prompt_start",
        "add_special_tokens",
        "stop",
    }
)


def check_task(message: pb.GenerateRequest, pooling: ModelPooling | None, model: str) -> None:
    """INVALID_ARGUMENT unless the model has the task that the request wants."""
    offered = "generate" if pooling is None else pooling.task
    if message.HasField("pooling"):
        wanted = message.pooling.task
        if wanted not in PROTO_TASKS.values():
            raise invalid(
                "pooling.task",
                f"pooling.task is {wanted}; give POOLING_TASK_EMBED or POOLING_TASK_SCORE",
            )
        if wanted == PROTO_TASKS.get(offered):
            return
    elif offered == "generate":
        return
    does, endpoints = _OFFERS[offered]
    raise invalid(
        "model",
        f"the model {model!r} {does} only; use {endpoints}, or another model (a worker's --task "
        "says what its model does)",
    )


def parse_pooling_request(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits,
    tokens: RequestTokens | None = None,
) -> ParsedRequest:
    """Checks a request, and tokenizes it unless `tokens` are given; then it needs no input.

    Raises RequestError, which names the field.
    """
    assert limits.pooling is not None
    _check_fields(message)
    _check_dimensions(message.pooling, limits.pooling)
    if tokens is None:
        tokens = tokenize_request(message, tokenizer, limits)
    if len(tokens.prompt) > limits.max_tokens:  # truncate_prompt_tokens may keep too many
        raise no_room(message, len(tokens.prompt), limits)
    return ParsedRequest(
        tokens=tokens,
        sampling=Sampling(seed=0, min_tokens=0, temperature=0.0),
        max_tokens=0,
        stop_ids=(),
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        text=None,
        include_stop_token=False,
        skip_special_tokens=True,
        beam_search=None,
        prompt_logprobs=None,
        prompt_text=False,
        pooling=message.pooling,
    )


def _check_fields(message: pb.GenerateRequest) -> None:
    for descriptor, _ in message.ListFields():
        if descriptor.name not in _ALLOWED:
            name = descriptor.name
            raise invalid(name, f"{name} is about output, and this request has none; remove it")
    for descriptor, value in message.stop.ListFields():
        if descriptor.name != "max_tokens" or value:
            name = f"stop.{descriptor.name}"
            raise invalid(name, f"{name} is {value}, and this request has no output; remove it")
    for field in ("cache_salt", "tenant"):
        if len(getattr(message, field)) > MAX_NAME_LENGTH:
            raise invalid(field, f"{field} is longer than {MAX_NAME_LENGTH} characters; shorten it")
    if message.HasField("deadline_ms") and not message.deadline_ms:
        raise invalid("deadline_ms", "deadline_ms is 0; it must be at least 1")


def _check_dimensions(params: pb.PoolingParams, pooling: ModelPooling) -> None:
    if not params.HasField("dimensions"):
        return
    if pooling.task != "embed":
        raise invalid("dimensions", "dimensions are of embeddings; remove it")
    if not 1 <= params.dimensions <= pooling.size:
        raise invalid(
            "dimensions",
            f"dimensions is {params.dimensions}; it must be 1 to {pooling.size}, the size of this "
            "model's embeddings",
        )
