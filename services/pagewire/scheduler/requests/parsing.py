"""From a GenerateRequest to a checked request: sampling, limits, stop conditions."""

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagewire.context_length import context_length_exceeded
from pagewire.errors import MAX_QUOTED_NAME, Code, RequestError, invalid, quoted
from pagewire.limits import MAX_LOGPROBS, MAX_NAME_LENGTH, MAX_REQUEST_ID_LENGTH
from pagewire.packing import pack, pack_floats
from pagewire.sampling import SamplingParams, StopConditions, numbers_of
from pagewire.scheduler.core.sequence import Sampling
from pagewire.scheduler.requests.beam_request import check_beam_search
from pagewire.scheduler.requests.open_request import is_loggable
from pagewire.scheduler.requests.prompt import (
    ModelLimits,
    RequestTokens,
    check_vocabulary,
    default_true,
    input_name,
    no_room,
    tokenize_request,
)
from pagewire.scheduler.structured.constraint import constraint_of
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import NO_TOKENIZER, TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb

_MAX_VISIBLE = 64


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request, ready to be queued."""

    tokens: RequestTokens
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    priority: int
    cache_salt: str
    tenant: str
    deadline_ms: int | None
    text: TextStream | None
    include_stop_token: bool
    skip_special_tokens: bool
    beam_search: pb.BeamSearch | None
    # Likeliest tokens of each prompt token; None for no log probabilities of the prompt.
    prompt_logprobs: int | None
    prompt_text: bool
    return_prompt: bool = False
    # The pooling that is wanted instead of output.
    pooling: pb.PoolingParams | None = None

    @property
    def wants_prompt(self) -> bool:
        """Whether the client wants more of its prompt than its token ids."""
        return self.prompt_text or self.prompt_logprobs is not None


def check_model(given: str, served: str) -> None:
    """NOT_FOUND unless the name is empty or that of the served model."""
    if given and given != served:
        raise RequestError(
            Code.NOT_FOUND,
            f"model {quoted(given, MAX_QUOTED_NAME)} does not exist; this server has {served!r}",
            "model",
        )


def check_request_id(request_id: str) -> None:
    """INVALID_ARGUMENT for an id that could not be logged as it is."""
    if not is_loggable(request_id):
        raise invalid(
            "request_id",
            f"request_id must have at most {MAX_REQUEST_ID_LENGTH} printable characters",
        )


def parse_request(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits,
    tokens: RequestTokens | None = None,
    grammar: str = "",
) -> ParsedRequest:
    """Checks a request, and tokenizes it unless `tokens` are given; then it needs no input.

    `grammar` is that of its structured output, if it has one.

    Raises RequestError, which names the field.
    """
    for field in ("cache_salt", "tenant"):
        if len(getattr(message, field)) > MAX_NAME_LENGTH:
            raise invalid(field, f"{field} is longer than {MAX_NAME_LENGTH} characters; shorten it")
    if message.HasField("deadline_ms") and not message.deadline_ms:
        raise invalid("deadline_ms", "deadline_ms is 0; it must be at least 1")
    params = SamplingParams.from_proto(message.sampling, tokenizer.default_sampling)
    wants_prompt = message.prompt_text or message.HasField("prompt_logprobs")
    stop = StopConditions.from_proto(message.stop, may_be_empty=wants_prompt)
    if message.prompt_text and isinstance(tokenizer, TokenIdsOnly):
        raise invalid("prompt_text", "this server has no tokenizer: prompts have no text to echo")
    if tokens is None:
        tokens = tokenize_request(message, tokenizer, limits)
    check_vocabulary(stop.stop_token_ids, "stop_token_ids", limits.vocab_size)
    bias_ids, biases = _biases(params, limits.vocab_size)
    max_tokens = _resolve_max_tokens(message, len(tokens.prompt), stop, limits)
    if len(tokens.resumed) > max_tokens:
        raise invalid(
            "resume_token_ids",
            f"{len(tokens.resumed)} tokens to resume from, max_tokens is {max_tokens}",
        )
    eos = () if stop.ignore_eos and not grammar else tokenizer.eos_token_ids
    stop_ids = tuple(dict.fromkeys(eos + stop.stop_token_ids))
    check_vocabulary(params.allowed_token_ids, "allowed_token_ids", limits.vocab_size)
    constraint = constraint_of(message, grammar, params, stop, stop_ids, tokenizer)
    if message.HasField("beam_search"):
        check_beam_search(message, len(stop_ids))
    return ParsedRequest(
        tokens=tokens,
        sampling=Sampling(
            **numbers_of(params),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            min_tokens=0 if constraint else stop.min_tokens,  # the constraint has it
            logprobs=_num_top(message, "logprobs", limits.vocab_size),
            bias_ids=bias_ids,
            biases=biases,
            constraint=constraint,
        ),
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        text=_text_stream(message, stop, tokenizer),
        include_stop_token=stop.include_stop_str_in_output,
        skip_special_tokens=default_true(message, "skip_special_tokens"),
        beam_search=message.beam_search if message.HasField("beam_search") else None,
        return_prompt=message.return_prompt_token_ids,
        prompt_logprobs=_num_top(message, "prompt_logprobs", limits.vocab_size),
        prompt_text=message.prompt_text,
    )


def _num_top(
    message: pb.GenerateRequest, field: Literal["logprobs", "prompt_logprobs"], vocab_size: int
) -> int | None:
    """The number of likeliest tokens that a field requests; None if it is absent."""
    if not message.HasField(field):
        return None
    given, limit = int(getattr(message, field)), min(MAX_LOGPROBS, vocab_size)
    if given > limit:
        raise invalid(field, f"{field} is {given}; at most {limit} are given")
    return given


def _biases(params: SamplingParams, vocab_size: int) -> tuple[bytes, bytes]:
    """`bias_ids` and `biases` of SlotSampling; a bias of 0 is left out."""
    check_vocabulary(params.logit_bias, "logit_bias", vocab_size)
    given = sorted((token, bias) for token, bias in params.logit_bias.items() if bias)
    biases = np.array([bias for _, bias in given], np.float32)
    return pack([token for token, _ in given]), pack_floats(biases)


def _resolve_max_tokens(
    message: pb.GenerateRequest, prompt: int, stop: StopConditions, limits: ModelLimits
) -> int:
    room = limits.max_tokens - prompt
    if room < 1:
        raise no_room(message, prompt, limits)
    for field, count in (("max_tokens", stop.max_tokens), ("min_tokens", stop.min_tokens)):
        if count is not None and count > room:
            raise context_length_exceeded(
                limits.length, prompt, count, part=input_name(message), field=field
            )
    return room if stop.max_tokens is None else stop.max_tokens


def _text_stream(
    message: pb.GenerateRequest, stop: StopConditions, tokenizer: Tokenizer | TokenIdsOnly
) -> TextStream | None:
    if isinstance(tokenizer, TokenIdsOnly) and not message.HasField("detokenize"):
        if stop.stop:
            raise invalid(
                "stop", f"stop strings need the text, and {NO_TOKENIZER}; give stop_token_ids"
            )
        return None
    if default_true(message, "detokenize"):
        if len(message.visible_special_tokens) > _MAX_VISIBLE:
            raise invalid(
                "visible_special_tokens",
                f"visible_special_tokens has {len(message.visible_special_tokens)} entries; give "
                f"{_MAX_VISIBLE} at most",
            )
        detokenizer = tokenizer.detokenizer(
            default_true(message, "skip_special_tokens"), message.visible_special_tokens
        )
        return TextStream(detokenizer, stop.stop, stop.include_stop_str_in_output, stop.min_tokens)
    if stop.stop:
        raise invalid("stop", "stop strings need the text; leave detokenize on or remove stop")
    return None
