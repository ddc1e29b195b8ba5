"""Threads and helper processes that tokenize, so that the event loop is not blocked.

A text of some kilobytes is tokenized in a thread: most of that needs no interpreter lock. A large
text goes to a process, which can be stopped.

A task is one byte for its kind, the limits, the size of the model's pooling, the pooling (empty if
there is none), and a serialized message.
"""

import asyncio
import resource
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError

from pagewire.config import SchedulerConfig
from pagewire.errors import invalid
from pagewire.helpers.pool import Bytes, HelperError, HelperPool
from pagewire.models import resolve_model, resolve_tokenizer, served_name
from pagewire.packing import unpack
from pagewire.rpc.interceptors import UNDECODABLE
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.parsing import check_model, parse_request
from pagewire.scheduler.requests.prompt import (
    ModelLimits,
    RequestTokens,
    check_vocabulary,
    tokenize_input,
    tokenize_request,
)
from pagewire.scheduler.text.tokenizer import TextBounds, TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb

_TASK = struct.Struct("<cQQQB")
_COUNTS = struct.Struct("<QQ?")  # prompt ids, ids to resume from, whether there is a prediction
_GENERATE, _TOKENIZE, _DETOKENIZE = b"G", b"T", b"D"
# Address space of a helper process that renders templates of clients. Tokenizing uses a part of it.
_MAX_TEMPLATE_MEMORY = 8 << 30
# More threads would wait for the interpreter's lock.
_THREADS = 2
# A larger task may take seconds.
_LARGE_BYTES = 256 << 10


def read_tokenizer(config: SchedulerConfig) -> Tokenizer | TokenIdsOnly:
    """The tokenizer of the model that a scheduler serves."""
    model = resolve_model(config.model)
    if config.skip_tokenizer:
        for name in ("tokenizer", "chat_template"):
            if getattr(config, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} and --skip-tokenizer exclude each other; give one")
        return TokenIdsOnly(model)
    folder = resolve_tokenizer(config.model, config.tokenizer)
    template = None if config.chat_template is None else Path(config.chat_template)
    return Tokenizer(folder, bounds_of(config), template, model)


def bounds_of(config: SchedulerConfig) -> TextBounds:
    """The bounds of the scheduler's settings on text."""
    return TextBounds(
        max_prompt_chars=config.max_prompt_chars,
        max_messages=config.max_messages,
        max_template_bytes=config.max_template_bytes,
        max_template_nodes=config.max_template_nodes,
        max_tools=config.max_tools,
        max_tool_bytes=config.max_tool_bytes,
        max_tool_nodes=config.max_tool_nodes,
        trust_request_chat_template=config.trust_request_chat_template,
    )


class TextHelpers:
    """The threads and processes that tokenize for a scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._pool = HelperPool(
            "tokenization",
            f"{__name__}:compute_with",
            config,
            size=config.tokenizer_processes,
            timeout=config.parse_timeout,
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def start(self) -> None:
        """Starts the first process, without waiting for it."""
        await self._pool.start()

    async def close(self) -> None:
        """Ends the processes and threads."""
        self._threads.shutdown(cancel_futures=True)
        await self._pool.close()

    async def tokens_of(
        self, message: pb.GenerateRequest, tokenizer: Tokenizer | TokenIdsOnly, limits: ModelLimits
    ) -> RequestTokens:
        """The token ids of a request, made in a thread; RequestError if it cannot be run."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, tokenize_request, message, tokenizer, limits
        )

    async def tokens(self, data: bytes, limits: ModelLimits) -> RequestTokens:
        """The token ids of a serialized GenerateRequest; RequestError if it cannot be run."""
        answer = await self._run(_GENERATE, data, limits)
        prompt, resumed, predicted = _COUNTS.unpack_from(answer)
        ids = unpack(bytes(memoryview(answer)[_COUNTS.size :]))
        end = prompt + resumed
        return RequestTokens(ids[:prompt], ids[prompt:end], ids[end:] if predicted else None)

    async def tokenize(self, data: bytes) -> bytes:
        """The serialized response to a serialized TokenizeRequest."""
        return bytes(await self._run(_TOKENIZE, data))

    async def detokenize(self, data: bytes) -> bytes:
        """The serialized response to a serialized DetokenizeRequest."""
        return bytes(await self._run(_DETOKENIZE, data))

    async def _run(self, kind: bytes, data: bytes, limits: ModelLimits | None = None) -> Bytes:
        numbers, pooling = (0, 0, 0), b""
        if limits is not None:
            numbers = (limits.max_model_len, limits.max_pool_tokens, limits.vocab_size)
            if limits.pooling is not None:
                pooling = limits.pooling.to_bytes()
        head = _TASK.pack(kind, *numbers, len(pooling)) + pooling
        try:
            return await self._pool.run(head, data, large=len(data) > _LARGE_BYTES)
        except HelperError as error:
            raise failures.helper_failed(str(error)) from error


def compute_with(config: SchedulerConfig) -> Callable[[bytes], bytes]:
    """The function that a helper process runs for each task."""
    tokenizer = read_tokenizer(config)
    if config.trust_request_chat_template:
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_TEMPLATE_MEMORY, _MAX_TEMPLATE_MEMORY))
    model = served_name(config.model, config.served_model_name)

    def compute(task: bytes) -> bytes:
        kind, *numbers, size = _TASK.unpack_from(task)
        try:
            pooling, data = task[_TASK.size : _TASK.size + size], task[_TASK.size + size :]
            if kind == _TOKENIZE:
                asked = pb.TokenizeRequest.FromString(data)
                return tokenized(asked, tokenizer, model).SerializeToString()
            if kind == _DETOKENIZE:
                given = pb.DetokenizeRequest.FromString(data)
                return detokenized(given, tokenizer, model).SerializeToString()
            message = pb.GenerateRequest.FromString(data)
            limits = ModelLimits(*numbers)
            if pooling:
                limits = replace(limits, pooling=ModelPooling.from_bytes(pooling))
                return _tokens(tokenize_request(message, tokenizer, limits))
            return _tokens(parse_request(message, tokenizer, limits).tokens)
        except DecodeError as error:
            raise invalid("", UNDECODABLE) from error

    return compute


def _tokens(tokens: RequestTokens) -> bytes:
    parts = [tokens.prompt, tokens.resumed]
    if (prediction := tokens.prediction) is not None:
        parts.append(prediction)
    counts = _COUNTS.pack(len(tokens.prompt), len(tokens.resumed), prediction is not None)
    return counts + b"".join(part.tobytes() for part in parts)


def tokenized(
    message: pb.TokenizeRequest, tokenizer: Tokenizer | TokenIdsOnly, model: str
) -> pb.TokenizeResponse:
    """The token ids of a text or a conversation; `model` is the name of the served model."""
    check_model(message.model, model)
    ids = tokenize_input(message, tokenizer).tolist()
    names = tokenizer.token_strs(ids) if message.return_token_strs else ()
    return pb.TokenizeResponse(token_ids=ids, token_strs=names)


def detokenized(
    message: pb.DetokenizeRequest, tokenizer: Tokenizer | TokenIdsOnly, model: str
) -> pb.DetokenizeResponse:
    """The text of token ids."""
    check_model(message.model, model)
    skip = not message.HasField("skip_special_tokens") or message.skip_special_tokens
    ids = list(message.token_ids)
    if tokenizer.vocab_size:
        check_vocabulary(ids, "tokens", tokenizer.vocab_size)
    return pb.DetokenizeResponse(text=tokenizer.decode(ids, skip))
