"""From a GenerateRequest to a sequence: rendering, tokenization, limits."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray

from pagewire.errors import Code, RequestError, invalid
from pagewire.limits import MAX_LOGPROBS, MAX_NAME_LENGTH, MAX_REQUEST_ID_LENGTH
from pagewire.packing import Int32Array, pack, pack_floats
from pagewire.sampling import SamplingParams, StopConditions
from pagewire.scheduler.core.sequence import Sampling
from pagewire.scheduler.requests.beam_request import check_beam_search
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer, TooManyTokensError
from pagewire.v1 import inference_pb2 as pb

# A number of two characters in JSON takes eleven bytes in a Struct.
_STRUCT_BYTES_A_NODE = 32


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the ready workers of the model can take; the largest of each."""

    max_model_len: int
    max_pool_tokens: int
    vocab_size: int

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return min(self.max_model_len, self.max_pool_tokens)


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """The token ids of a request: of its prompt, and those that it resumes from."""

    prompt: Int32Array
    resumed: Int32Array


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
    beam_search: pb.BeamSearch | None


def check_model(given: str, served: str) -> None:
    """NOT_FOUND unless the name is the one served, or empty."""
    if given and given != served:
        raise RequestError(
            Code.NOT_FOUND, f"model {given!r} does not exist; this server has {served!r}", "model"
        )


def check_request_id(request_id: str) -> None:
    """INVALID_ARGUMENT for an id that could not be logged as it is."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        raise invalid(
            "request_id",
            f"request_id must have at most {MAX_REQUEST_ID_LENGTH} printable characters",
        )


def parse_request(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits,
    tokens: RequestTokens | None = None,
) -> ParsedRequest:
    """Checks a request and tokenizes it, unless its `tokens` are given: then `message` needs none.

    Raises RequestError naming the field at fault.
    """
    for field in ("cache_salt", "tenant"):
        if len(getattr(message, field)) > MAX_NAME_LENGTH:
            raise invalid(field, f"{field} is longer than {MAX_NAME_LENGTH} characters; shorten it")
    if message.HasField("deadline_ms") and not message.deadline_ms:
        raise invalid("deadline_ms", "deadline_ms is 0; it must be at least 1")
    params = SamplingParams.from_proto(message.sampling, tokenizer.default_sampling)
    stop = StopConditions.from_proto(message.stop)
    if tokens is None:
        tokens = _tokens(message, tokenizer, limits)
    if not _in_vocabulary(stop.stop_token_ids, limits.vocab_size):
        raise invalid("stop_token_ids", _outside(stop.stop_token_ids, limits.vocab_size))
    bias_ids, biases = _biases(params, limits.vocab_size)
    max_tokens = _resolve_max_tokens(len(tokens.prompt), stop, limits)
    if len(tokens.resumed) > max_tokens:
        raise invalid(
            "resume_token_ids",
            f"{len(tokens.resumed)} tokens to resume from, max_tokens is {max_tokens}",
        )
    eos = () if stop.ignore_eos else tokenizer.eos_token_ids
    stop_ids = tuple(dict.fromkeys(eos + stop.stop_token_ids))
    if message.HasField("beam_search"):
        check_beam_search(message, len(stop_ids))
    return ParsedRequest(
        tokens=tokens,
        sampling=Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            min_tokens=stop.min_tokens,
            logprobs=_logprobs(message, limits.vocab_size),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            bias_ids=bias_ids,
            biases=biases,
        ),
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        text=_text_stream(message, stop, tokenizer),
        include_stop_token=stop.include_stop_str_in_output,
        beam_search=message.beam_search if message.HasField("beam_search") else None,
    )


def tokenize_input(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits | None = None,
) -> Int32Array:
    """The prompt's token ids [n], n >= 1; RequestError for one that `limits` have no room for."""
    kind: str | None = message.WhichOneof("input")
    if kind is None:
        raise invalid("input", "the request has no input; set a prompt, chat or token ids")
    field = {"chat": "messages", "prompt_token_ids": "prompt"}.get(kind, kind)
    if isinstance(message, pb.GenerateRequest) and kind == "prompt_token_ids":
        assert limits is not None
        ids = _checked_ids(message.prompt_token_ids.ids, limits)
    else:
        text = render_chat(message.chat, tokenizer) if kind == "chat" else getattr(message, kind)
        special = kind == "prompt" or (
            kind == "text" and _default_true(message, "add_special_tokens")
        )
        most = None if limits is None else limits.max_tokens - 1
        try:
            ids = tokenizer.encode(text, special, most)
        except TooManyTokensError as error:
            assert limits is not None
            raise _no_room(f"more than {error.most}", limits) from error
    if not len(ids):
        raise invalid(field, f"{field} is empty; give at least one token")
    return ids


def render_chat(chat: pb.ChatInput, tokenizer: Tokenizer | TokenIdsOnly) -> str:
    """The text of a conversation by the model's template."""
    if tokenizer.chat_template is None:
        raise invalid("messages", "this model has no chat template; use a plain prompt")
    if not chat.messages:
        raise invalid("messages", "messages is empty; give at least one message")
    bounds = tokenizer.bounds
    if len(chat.messages) > bounds.max_messages:
        raise invalid(
            "messages",
            f"messages has {len(chat.messages)} entries; give {bounds.max_messages} at most "
            "(max_messages)",
        )
    size = chat.template_kwargs.ByteSize()
    most = bounds.max_template_bytes + _STRUCT_BYTES_A_NODE * bounds.max_template_nodes
    if size > most:
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs has {size} bytes as a Struct; give {most} at most "
            "(max_template_bytes, and 32 bytes for each of max_template_nodes)",
        )
    messages = []
    for message in chat.messages:
        entry = {"role": message.role, "content": message.content}
        if message.HasField("name"):
            entry["name"] = message.name
        messages.append(entry)
    try:
        variables: dict[str, Any] = MessageToDict(chat.template_kwargs)
    except ValueError as error:  # NaN and infinity have no JSON
        raise invalid("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
    nodes = _count_nodes(variables)
    if nodes > bounds.max_template_nodes:
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs has {nodes} values; give {bounds.max_template_nodes} at most "
            "(max_template_nodes)",
        )
    reserved = variables.keys() & {"messages", "add_generation_prompt"}
    if reserved:
        raise invalid("chat_template_kwargs", f"{reserved.pop()} cannot be set here")
    return tokenizer.chat_template.render(
        messages, _default_true(chat, "add_generation_prompt"), variables
    )


def _logprobs(message: pb.GenerateRequest, vocab_size: int) -> int | None:
    if not message.HasField("logprobs"):
        return None
    most = min(MAX_LOGPROBS, vocab_size)
    if message.logprobs > most:
        raise invalid("logprobs", f"logprobs is {message.logprobs}; at most {most} are given")
    return int(message.logprobs)


def _biases(params: SamplingParams, vocab_size: int) -> tuple[bytes, bytes]:
    """`bias_ids` and `biases` of SlotSampling; a bias of 0 is none."""
    if not _in_vocabulary(params.logit_bias, vocab_size):
        outside = _outside(params.logit_bias, vocab_size)
        raise invalid("logit_bias", f"logit_bias: {outside}; remove it")
    given = sorted((token, bias) for token, bias in params.logit_bias.items() if bias)
    biases = np.array([bias for _, bias in given], np.float32)
    return pack([token for token, _ in given]), pack_floats(biases)


def _default_true(message: Any, field: str) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else True


def _count_nodes(value: Any) -> int:
    """Values in a JSON value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count_nodes, inner))


def _tokens(
    message: pb.GenerateRequest, tokenizer: Tokenizer | TokenIdsOnly, limits: ModelLimits
) -> RequestTokens:
    resumed = message.resume_token_ids
    if len(resumed) > limits.max_tokens:
        raise invalid(
            "resume_token_ids",
            f"{len(resumed)} tokens to resume from, and a sequence has {limits.max_tokens} at most",
        )
    known = _as_array(resumed)
    if known.max(initial=0) >= limits.vocab_size:
        raise invalid("resume_token_ids", _outside(resumed, limits.vocab_size))
    return RequestTokens(tokenize_input(message, tokenizer, limits), known.astype(np.int32))


def _checked_ids(ids: Any, limits: ModelLimits) -> Int32Array:
    if len(ids) >= limits.max_tokens:
        raise _no_room(str(len(ids)), limits)
    found = _as_array(ids)
    if found.max(initial=0) >= limits.vocab_size:
        raise invalid("prompt", _outside(ids, limits.vocab_size))
    return found.astype(np.int32)


def _as_array(ids: Any) -> NDArray[np.int64]:
    return np.array(ids[:], dtype=np.int64)  # a list at once, then one pass over it


def _in_vocabulary(ids: Any, vocab_size: int) -> bool:
    return not ids or max(ids) < vocab_size


def _outside(ids: Any, vocab_size: int) -> str:
    return f"token id {max(ids)} is outside the model's vocabulary of {vocab_size} ids"


def _resolve_max_tokens(prompt: int, stop: StopConditions, limits: ModelLimits) -> int:
    room = limits.max_tokens - prompt
    if room < 1:
        raise _no_room(str(prompt), limits)
    for field, count in (("max_tokens", stop.max_tokens), ("min_tokens", stop.min_tokens)):
        if count is not None and count > room:
            raise invalid(
                field,
                f"{prompt} prompt tokens and {field} {count} are more than {_bound(limits)}; "
                f"lower {field} to {room} or shorten the prompt",
            )
    return room if stop.max_tokens is None else stop.max_tokens


def _no_room(count: str, limits: ModelLimits) -> RequestError:
    return invalid(
        "prompt",
        f"the prompt has {count} tokens, which leaves no room for output in {_bound(limits)}; "
        "shorten it",
    )


def _bound(limits: ModelLimits) -> str:
    """What keeps a sequence from being longer."""
    if limits.max_model_len <= limits.max_pool_tokens:
        return f"the model's length of {limits.max_model_len}"
    return f"the {limits.max_pool_tokens} tokens that the KV cache holds"


def _text_stream(
    message: pb.GenerateRequest, stop: StopConditions, tokenizer: Tokenizer | TokenIdsOnly
) -> TextStream | None:
    if _default_true(message, "detokenize"):
        return TextStream(tokenizer.detokenizer(), stop.stop, stop.include_stop_str_in_output)
    if stop.stop:
        raise invalid("stop", "stop strings need the text; leave detokenize on or remove stop")
    return None
