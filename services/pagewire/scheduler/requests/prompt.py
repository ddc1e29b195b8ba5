"""A request's input as token ids: chat rendering, tokenization, and the room for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray

from pagewire.context_length import context_length_exceeded
from pagewire.errors import Code, RequestError, invalid
from pagewire.packing import Int32Array
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.text.chat_template import RESERVED, ChatTemplate
from pagewire.scheduler.text.text_pairs import pair_text
from pagewire.scheduler.text.tokenizer import (
    NO_TOKENIZER,
    TextBounds,
    TokenIdsOnly,
    Tokenizer,
    TooManyTokensError,
)
from pagewire.scheduler.text.tool_input import (
    check_tool_input,
    template_message,
    template_tools,
)
from pagewire.v1 import inference_pb2 as pb

# A number of two characters in JSON takes eleven bytes in a Struct.
_STRUCT_BYTES_A_NODE = 32

_POOLED_INPUTS: dict[int, tuple[str, ...]] = {
    pb.POOLING_TASK_EMBED: ("prompt", "prompt_token_ids"),
    pb.POOLING_TASK_SCORE: ("pair", "prompt", "prompt_token_ids"),
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the model's ready workers; the largest of each."""

    max_model_len: int
    max_pool_tokens: int
    vocab_size: int
    constraints: bool = False  # whether every worker accepts constraints
    pooling: ModelPooling | None = None  # None: the workers generate

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return min(self.max_model_len, self.max_pool_tokens)

    @property
    def length(self) -> str:
        """`max_tokens` as the length of a context in error messages."""
        if self.max_model_len <= self.max_pool_tokens:
            return f"{self.max_model_len} tokens"
        return f"{self.max_pool_tokens} tokens, as many as the KV cache holds"


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """The token ids of a request: prompt [n], those that it resumes from [m], and prediction."""

    prompt: Int32Array
    resumed: Int32Array
    prediction: Int32Array | None = None  # [p]; None for a request without one


def tokenize_request(
    message: pb.GenerateRequest, tokenizer: Tokenizer | TokenIdsOnly, limits: ModelLimits
) -> RequestTokens:
    """The token ids of a request; RequestError if they do not fit or are invalid."""
    resumed = message.resume_token_ids
    if len(resumed) > limits.max_tokens:
        raise invalid(
            "resume_token_ids",
            f"{len(resumed)} tokens to resume from, and a sequence has {limits.max_tokens} at most",
        )
    ids = _checked_ids(resumed, "resume_token_ids", limits.vocab_size)
    prediction = None
    if message.HasField("prediction"):
        prediction = _prediction(message, tokenizer, limits)
    return RequestTokens(tokenize_input(message, tokenizer, limits), ids, prediction)


def _prediction(
    message: pb.GenerateRequest, tokenizer: Tokenizer | TokenIdsOnly, limits: ModelLimits
) -> Int32Array:
    field = "prediction"
    if isinstance(tokenizer, TokenIdsOnly):
        raise invalid(field, f"{field}: {NO_TOKENIZER}; leave it out")
    for other in ("pooling", "beam_search"):
        if message.HasField(other):
            raise invalid(field, f"{field} and {other} exclude each other; leave it out")
    most = tokenizer.bounds.max_prompt_chars
    if len(message.prediction) > most:
        raise invalid(
            field,
            f"{field} has {len(message.prediction)} characters and at most {most} are taken "
            "(max_prompt_chars); shorten it",
        )
    try:
        ids = tokenizer.encode(message.prediction, False, limits.max_tokens)
    except TooManyTokensError as error:
        raise invalid(
            field,
            f"{field} has more than {error.limit} tokens, the most of a sequence; shorten it",
        ) from error
    return ids[ids < limits.vocab_size]  # others are never drawn


def tokenize_input(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits | None = None,
) -> Int32Array:
    """The prompt's token ids [n]; RequestError for one that `limits` have no room for.

    A prompt to generate from has at least one token.
    """
    kind: str | None = message.WhichOneof("input")
    if kind is None:
        raise invalid("input", "the request has no input; set a prompt, chat or token ids")
    if isinstance(message, pb.GenerateRequest) and message.HasField("pooling"):
        _check_pooled_input(message, kind)
    elif kind == "pair":
        raise invalid("pair", "a pair is scored, and this request has no pooling; give a prompt")
    field = {"chat": "messages", "prompt_token_ids": "prompt"}.get(kind, kind)
    if isinstance(message, pb.GenerateRequest) and kind == "prompt_token_ids":
        assert limits is not None
        sent = message.prompt_token_ids.ids
        given = sent[kept_part(message, kept_tokens(message, limits), len(sent))]
        if len(given) > limits.max_tokens - reserved_tokens(message):
            raise no_room(message, len(given), limits)
        ids = _checked_ids(given, field, limits.vocab_size)
    else:
        text = _text(message, kind, tokenizer, limits)
        # A template writes the special tokens itself, and so does the text made of a pair.
        special = kind in ("prompt", "text") or isinstance(text, tuple)
        limit = None if limits is None else limits.max_tokens - reserved_tokens(message)
        kept = None
        if isinstance(message, pb.GenerateRequest):
            kept = kept_tokens(message, limits)
            limit = limit if kept is None else None  # the tokens that are kept come last
        if message.HasField("add_special_tokens"):
            special = message.add_special_tokens
        try:
            ids = tokenizer.encode(text, special, limit)
        except TooManyTokensError as error:
            assert limits is not None
            assert isinstance(message, pb.GenerateRequest)
            raise no_room(message, error.limit, limits, exact=False) from error
        if isinstance(message, pb.GenerateRequest):
            ids = ids[kept_part(message, kept, len(ids))]
        if limits is not None and ids.max(initial=0) >= limits.vocab_size:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"the tokenizer turns this text into the id {ids.max()}, which is outside the "
                f"model's vocabulary of {limits.vocab_size} ids; the server needs the model's own "
                "tokenizer",
                field,
            )
    if not len(ids) and isinstance(message, pb.GenerateRequest):
        raise invalid(field, f"{field} is empty; give at least one token")
    return ids


def _text(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    kind: str,
    tokenizer: Tokenizer | TokenIdsOnly,
    limits: ModelLimits | None,
) -> str | tuple[str, str]:
    """The text of an input; two texts for a pair that the tokenizer joins."""
    if kind == "chat":
        return render_chat(message.chat, tokenizer)
    if kind != "pair":
        return str(getattr(message, kind))
    assert isinstance(message, pb.GenerateRequest)
    assert limits is not None
    assert limits.pooling is not None
    return pair_text(message.pair, limits.pooling.pair_format)


def render_chat(chat: pb.ChatInput, tokenizer: Tokenizer | TokenIdsOnly) -> str:
    """The text of a conversation by the model's template."""
    if isinstance(tokenizer, TokenIdsOnly):
        raise invalid("messages", f"{NO_TOKENIZER}; give token ids as the prompt of a completion")
    template = tokenizer.chat_template
    if chat.HasField("chat_template"):
        template = tokenizer.request_templates.parse(chat.chat_template)
    if template is None:
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
    max_size = max_struct_bytes(bounds)
    if size > max_size:
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs has {size} bytes as a Struct; give {max_size} at most "
            f"(max_template_bytes, and {_STRUCT_BYTES_A_NODE} bytes for each of "
            "max_template_nodes)",
        )
    check_tool_input(chat, bounds)
    messages = [template_message(message, i) for i, message in enumerate(chat.messages)]
    variables = _template_variables(chat, bounds.max_template_nodes)
    for name in ("tools", "documents"):
        if name in variables and getattr(chat, name):
            raise invalid(
                "chat_template_kwargs",
                f"chat_template_kwargs.{name} and {name} are both given; remove one",
            )
    if chat.tools:
        variables["tools"] = template_tools(chat.tools, bounds.max_tools)
    if chat.documents:
        variables["documents"] = _documents(chat, template, bounds)
    continued = chat.continue_final_message
    if continued and chat.add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; give one",
        )
    opens_turn = not continued and default_true(chat, "add_generation_prompt")
    return template.render(messages, opens_turn, variables, continue_final_message=continued)


def _documents(
    chat: pb.ChatInput, template: ChatTemplate, bounds: TextBounds
) -> list[dict[str, Any]]:
    if template.reads is not None and "documents" not in template.reads:
        raise invalid("documents", "this model's chat template takes no documents; leave them out")
    size = sum(document.ByteSize() for document in chat.documents)
    max_size = max_struct_bytes(bounds)
    if size > max_size:
        raise invalid(
            "documents", f"documents have {size} bytes as Structs; give {max_size} at most"
        )
    try:
        return [MessageToDict(document) for document in chat.documents]
    except ValueError as error:  # NaN and infinity have no JSON
        raise invalid("documents", f"documents: {error}") from error


def max_struct_bytes(bounds: TextBounds) -> int:
    """The most bytes of template variables as they are sent."""
    return bounds.max_template_bytes + _STRUCT_BYTES_A_NODE * bounds.max_template_nodes


def kept_tokens(message: pb.GenerateRequest, limits: ModelLimits | None) -> int | None:
    """How many tokens of the prompt are kept; None for all."""
    field = "truncate_prompt_tokens"
    if not message.HasField(field):
        if message.keep_prompt_start:
            side = "keep_prompt_start"
            raise invalid(side, f"{side} is true, which needs {field}; set it or remove {side}")
        return None
    kept = int(message.truncate_prompt_tokens)
    if kept == -1:
        assert limits is not None
        return max(1, limits.max_tokens - (message.stop.max_tokens or reserved_tokens(message)))
    if kept < 1:
        raise invalid(field, f"{field} is {kept}; it must be at least 1, or -1")
    return kept


def _check_pooled_input(message: pb.GenerateRequest, kind: str) -> None:
    """Raises RequestError for an input that the pooling task does not accept."""
    task = message.pooling.task
    if kind not in _POOLED_INPUTS[task]:
        name = pb.PoolingTask.Name(task)
        raise invalid(
            kind, f"{kind} is not an input of {name}; give {' or '.join(_POOLED_INPUTS[task])}"
        )
    if kind == "pair" and message.HasField("truncate_prompt_tokens"):
        raise invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens could cut the end of a pair, which the model needs; shorten "
            "the document instead",
        )


def reserved_tokens(message: pb.GenerateRequest | pb.TokenizeRequest) -> int:
    """The tokens that a prompt leaves room for: one of output, unless it generates none."""
    return int(not isinstance(message, pb.GenerateRequest) or not message.HasField("pooling"))


def kept_part(message: pb.GenerateRequest, kept: int | None, count: int) -> slice:
    """The part of `count` prompt tokens that is kept."""
    if kept is None or kept >= count:
        return slice(count)
    return slice(kept) if message.keep_prompt_start else slice(count - kept, count)


def default_true(message: Any, field: str) -> bool:
    """The value of an optional bool that is true where it is left out."""
    return bool(getattr(message, field)) if message.HasField(field) else True


def check_vocabulary(ids: Any, field: str, vocab_size: int) -> None:
    """INVALID_ARGUMENT if one of the non-negative `ids` is not a token of the model."""
    if ids and max(ids) >= vocab_size:
        raise _outside(field, max(ids), vocab_size)


def no_room(
    message: pb.GenerateRequest, count: int, limits: ModelLimits, exact: bool = True
) -> RequestError:
    """The error of a prompt of `count` tokens, or of more, that leaves no room for its output."""
    part = input_name(message)
    completion = message.stop.max_tokens or reserved_tokens(message)
    return context_length_exceeded(
        limits.length, count, completion, exact=exact, part=part, field=part
    )


def input_name(message: pb.GenerateRequest) -> str:
    """The name of the input over HTTP: "messages" or "prompt"."""
    return "messages" if message.HasField("chat") else "prompt"


def _template_variables(chat: pb.ChatInput, max_nodes: int) -> dict[str, Any]:
    try:
        variables: dict[str, Any] = MessageToDict(chat.template_kwargs)
    except ValueError as error:  # NaN and infinity have no JSON
        raise invalid("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
    nodes = _count_nodes(variables)
    if nodes > max_nodes:
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs has {nodes} values; give {max_nodes} at most "
            "(max_template_nodes)",
        )
    reserved = variables.keys() & RESERVED
    if reserved:
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs.{min(reserved)} cannot be "
            "set: chat templates get it from the request's other fields; remove it",
        )
    return variables


def _count_nodes(value: Any) -> int:
    """Values in a JSON value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count_nodes, inner))


def _checked_ids(ids: Any, field: str, vocab_size: int) -> Int32Array:
    # From a list at once: a million ids must not take a Python call each.
    found: NDArray[np.int64] = np.array(ids[:], dtype=np.int64)
    largest = int(found.max(initial=0))
    if largest >= vocab_size:
        raise _outside(field, largest, vocab_size)
    return found.astype(np.int32)


def _outside(field: str, token: int, vocab_size: int) -> RequestError:
    return invalid(
        field,
        f"{field}: token id {token} is outside the model's vocabulary of {vocab_size} ids; "
        "remove it",
    )
