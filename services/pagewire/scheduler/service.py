"""The public gRPC service of a scheduler."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.auth.costs import cost_of, usage_of
from pagewire.errors import Code, RequestError
from pagewire.packing import unpack, unpack_floats, unpack_unsigned
from pagewire.rpc.checksums import CorruptMessageError
from pagewire.rpc.interceptors import UNDECODABLE, Continuation, abort_with
from pagewire.rpc.key_interceptor import current_caller
from pagewire.rpc.protocol import HEARTBEAT_SECONDS
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.large_requests import INLINE_TEXT_BYTES, Arrival, arrival_of, grows
from pagewire.scheduler.requests.open_request import error_finish
from pagewire.scheduler.requests.text_helper import detokenized, tokenized
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc

log = logging.getLogger(__name__)

LOAD_INTERVAL = 0.1
# While steps come, they come sooner than this, and no timer wakes the process between them.
LOAD_INTERVAL_WITHOUT_NEWS = 0.15

Context = grpc.aio.ServicerContext[Any, Any]


# Requests above so many bytes reach their method as they came: decoding them takes time.
_RAW = {
    "Generate": INLINE_TEXT_BYTES,
    "Tokenize": INLINE_TEXT_BYTES,
    "Detokenize": INLINE_TEXT_BYTES,
}


class RawRequests(grpc.aio.ServerInterceptor):
    """Leaves large requests serialized, and answers that are serialized already."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, which gets bytes or a message, and may return either."""
        handler = await continuation(details)
        most = _RAW.get(details.method.rpartition("/")[2])
        if handler is None or most is None:
            return handler
        decode, encode = handler.request_deserializer, handler.response_serializer
        return handler._replace(
            request_deserializer=lambda data: _read(data, decode, most),
            response_serializer=lambda answer: (
                answer if isinstance(answer, bytes) else encode(answer)
            ),
        )


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Maps calls to the engine; see inference.proto for what each promises."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest | bytes, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One request, its deltas as they come."""
        caller, owner = current_caller(), ""
        try:
            arrival = _arrival(request)
            if caller is not None:
                owner, arrival.message.tenant = caller.key.name, caller.key.tenant
                caller.admit(cost_of(arrival.message, arrival.prompt_tokens, self._max_model_len()))
        except RequestError as error:
            await abort_with(context, error)
        await self._engine.solitude.over()
        buffer, finish = DeltaBuffer(), None
        self._engine.submit(arrival, buffer, 0, owner=owner)
        try:
            while True:
                await buffer.ready.wait()
                news = buffer.take()
                finish = news.finished[0].finish if news.finished else None
                if finish is not None and finish.reason == pb.FINISH_REASON_ERROR:
                    await abort_with(context, _request_error(finish.error))
                yield _response(arrival.message, news, finish)
                if finish is not None:
                    return
        finally:
            self._engine.abort(buffer, 0)
            if caller is not None:
                usage = usage_of(finish or _finish_in(buffer))
                caller.used = usage.prompt_tokens + usage.completion_tokens

    async def Multiplex(  # noqa: N802
        self, requests: AsyncIterator[pb.MultiplexRequest], context: Context
    ) -> None:
        """A gateway's stream: reads requests beside writing the news of all of them."""
        buffer = DeltaBuffer(moves=True)
        reader = asyncio.create_task(self._read(requests, buffer))
        self._engine.solitude.join(buffer)
        try:
            await self._write(context, buffer, reader)
        finally:
            reader.cancel()
            self._engine.abort_all(buffer)
            self._engine.solitude.part(buffer)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Ends a request by id; with a key one of its own only."""
        caller = current_caller()
        owner = None if caller is None else caller.key.name
        return pb.AbortResponse(found=self._engine.abort_by_id(request.request_id, owner))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest | bytes, context: Context
    ) -> pb.TokenizeResponse | bytes:
        """Token ids of a text or a conversation."""
        engine = self._engine
        try:
            if isinstance(request, bytes):
                return await engine.helpers.tokenize(request)
            return tokenized(request, engine.tokenizer, engine.model)
        except RequestError as error:
            await abort_with(context, error)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest | bytes, context: Context
    ) -> pb.DetokenizeResponse | bytes:
        """Text of token ids."""
        engine = self._engine
        try:
            if isinstance(request, bytes):
                return await engine.helpers.detokenize(request)
            return detokenized(request, engine.tokenizer, engine.model)
        except RequestError as error:
            await abort_with(context, error)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The model served."""
        return self._engine.models()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.Load:  # noqa: N802
        """How busy this scheduler is."""
        return self._engine.load()

    def _max_model_len(self) -> int:
        """0 before a worker was ready."""
        models = self._engine.models().models
        return int(models[0].max_model_len) if models else 0

    async def _read(
        self, requests: AsyncIterator[pb.MultiplexRequest], buffer: DeltaBuffer
    ) -> None:
        """Takes what a gateway sends; DecodeError for what is no message, CorruptMessageError for
        what was damaged."""
        try:
            async for message in requests:
                buffer.received += 1
                await buffer.read.wait()  # who does not read its news may not ask for more
                if message.WhichOneof("message") == "submit":
                    self._submit(message.submit, buffer)
                elif message.WhichOneof("message") == "abort":
                    self._engine.abort(buffer, message.abort)
                elif message.WhichOneof("message") == "solitude":
                    if message.solitude:
                        self._engine.solitude.ask(buffer)
                    else:
                        self._engine.solitude.give_up(buffer)
        finally:
            buffer.ready.set()

    def _submit(self, submit: pb.Submit, buffer: DeltaBuffer) -> None:
        try:
            arrival = _arrival(submit.request)
        except RequestError as failure:
            buffer.add_finish(submit.stream, error_finish(failure), 0)
        else:
            told = submit.worker_losses if submit.HasField("worker_losses") else None
            self._engine.submit(arrival, buffer, submit.stream, submit.moved, worker_losses=told)

    async def _write(
        self, context: Context, buffer: DeltaBuffer, reader: "asyncio.Task[None]"
    ) -> None:
        """Sends news until the gateway closes its side."""
        loop = asyncio.get_running_loop()
        models, load, sent_at, beat_at = None, None, 0.0, 0.0
        solitude = (0, False)
        timer = loop.call_soon(buffer.ready.set)
        while not reader.done():
            now = loop.time()
            response = buffer.take()
            changed = len(response.streams) > 0 or len(response.finished) > 0
            if models is None:
                response.instance_id = self._engine.instance_id
            if (count := self._engine.solitude.count) > 0:
                alone = count % 2 == 1 and self._engine.is_alone(buffer)
                response.solitudes, response.alone = count, alone
                changed |= solitude != (count, alone)
                solitude = count, alone
            if now - sent_at >= LOAD_INTERVAL:
                state = (self._engine.models(), self._engine.draining)
                if state != models:
                    models, changed = state, True
                    response.models.CopyFrom(state[0])
                new_load = self._engine.load()
                if new_load != load or now - beat_at >= HEARTBEAT_SECONDS:
                    load, changed, beat_at = new_load, True, now
                    response.load.CopyFrom(new_load)
                    if buffer.read.is_set():
                        response.received = buffer.received
                sent_at = now
                timer.cancel()
                timer = loop.call_later(LOAD_INTERVAL_WITHOUT_NEWS, buffer.ready.set)
            response.draining = self._engine.draining
            if changed:
                await context.write(response)
            await buffer.ready.wait()
        error = reader.exception()
        if isinstance(error, DecodeError):
            await abort_with(context, RequestError(Code.INVALID_ARGUMENT, UNDECODABLE))
        if isinstance(error, CorruptMessageError):
            log.warning("a gateway's stream ends: %s", error)
            await abort_with(context, RequestError(Code.DATA_LOSS, str(error)))
        await reader


def _read(data: bytes, decode: Callable[[bytes], Any], most: int) -> Any:
    """The message, or its bytes if it is too large for the event loop."""
    if len(data) > most:
        return data
    message = decode(data)
    return data if not isinstance(message, pb.DetokenizeRequest) and grows(message) else message


def _arrival(request: pb.GenerateRequest | bytes) -> Arrival:
    """A request in either form; RequestError if it is none."""
    if not isinstance(request, bytes):
        return Arrival.of(request)
    try:
        return arrival_of(request)
    except DecodeError as error:
        raise RequestError(Code.INVALID_ARGUMENT, UNDECODABLE) from error


def _response(
    request: pb.GenerateRequest, news: pb.MultiplexResponse, finish: pb.Finish | None
) -> pb.GenerateResponse:
    """The news of the only request of a stream."""
    response = pb.GenerateResponse(
        request_id=request.request_id,
        index=int(unpack_unsigned(news.indices)[0]) if news.indices else _completed(finish),
        token_ids=unpack(news.token_ids).tolist(),
        text=news.text.decode(),
        finish=finish,
    )
    if news.candidate_counts:
        with_bytes = not request.HasField("detokenize") or request.detokenize
        _add_logprobs(response, news, with_bytes)
    return response


def _completed(finish: pb.Finish | None) -> int:
    return finish.usage.completion_tokens if finish is not None else 0


def _add_logprobs(
    response: pb.GenerateResponse, news: pb.MultiplexResponse, with_bytes: bool
) -> None:
    """Adds what the candidates of the only request of a stream say."""
    width = max(news.candidate_counts)
    ids = unpack(news.candidate_ids).reshape(-1, width)
    values = unpack_floats(news.candidate_logprobs).reshape(-1, width)
    response.logprobs.extend(values[:, 0].tolist())
    response.top_token_ids.extend(ids[:, 1:].ravel().tolist())
    response.top_logprobs.extend(values[:, 1:].ravel().tolist())
    if not with_bytes:
        return
    at = 0
    for candidate, size in enumerate(news.candidate_sizes):
        data = news.candidate_bytes[at : at + size]
        at += size
        (response.top_token_bytes if candidate % width else response.token_bytes).append(data)


def _finish_in(buffer: DeltaBuffer) -> pb.Finish:
    """How the only request of a stream has ended."""
    while buffer.ready.is_set():
        news = buffer.take()
        if news.finished:
            return news.finished[0].finish
    raise AssertionError("the request has not ended")


def _request_error(error: pb.Error) -> RequestError:
    seconds = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else None
    return RequestError(Code(error.code), error.message, error.field, seconds)
