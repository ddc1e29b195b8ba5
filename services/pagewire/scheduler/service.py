"""The public gRPC service of a scheduler."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.auth.costs import cost_of, usage_of
from pagewire.errors import Code, RequestError, invalid
from pagewire.limits import MAX_GIVEN_ID_LENGTH
from pagewire.packing import unpack_floats
from pagewire.rpc.checksums import CorruptMessageError
from pagewire.rpc.interceptors import UNDECODABLE, Continuation, abort_with
from pagewire.rpc.key_interceptor import current_caller
from pagewire.rpc.protocol import HEARTBEAT_SECONDS
from pagewire.scheduler.core.queue.job_admission import JobAdmissions
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.incoming_request import (
    INLINE_TEXT_BYTES,
    IncomingRequest,
    expands,
    read_request,
)
from pagewire.scheduler.requests.open_request import error_finish
from pagewire.scheduler.requests.single_stream import finish_in, request_error, response_of
from pagewire.scheduler.requests.text_helper import detokenized, tokenized
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from pagewire.v1 import snapshot_pb2 as snapshot_pb

log = logging.getLogger(__name__)

# Seconds between two messages about load. Without deltas, a timer of the longer interval wakes the
# stream. Deltas arrive sooner and postpone it, so a busy stream has no wake-ups for load.
LOAD_INTERVAL = 0.1
LOAD_INTERVAL_WITHOUT_NEWS = 0.15

Context = grpc.aio.ServicerContext[Any, Any]

MAX_GATEWAYS = 64  # of a snapshot

REQUEST_ID_METADATA = "x-request-id"

# Methods whose large requests reach them serialized.
_RAW_METHODS = ("Generate", "Pool", "Tokenize", "Detokenize")


class RawRequests(grpc.aio.ServerInterceptor):
    """Leaves large requests serialized, because decoding them would block the event loop.

    Responses that a helper process has serialized pass as they are.
    """

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, which gets bytes or a message, and may return either."""
        handler = await continuation(details)
        if handler is None or details.method.rpartition("/")[2] not in _RAW_METHODS:
            return handler
        decode, encode = handler.request_deserializer, handler.response_serializer
        return handler._replace(
            request_deserializer=lambda data: _read(data, decode),
            response_serializer=lambda answer: (
                answer if isinstance(answer, bytes) else encode(answer)
            ),
        )


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Maps calls to the engine; inference.proto documents each of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gateways: dict[DeltaBuffer, str] = {}  # the peer of each open stream

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest | bytes, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the deltas of one request."""
        caller, owner = current_caller(), ""
        if self._engine.intake.draining:  # a proxy retries only before metadata
            await abort_with(context, failures.draining())
        try:
            incoming = _incoming(request)
            await _take_given_id(incoming.message, context)
            if caller is not None:
                owner, incoming.message.tenant = caller.key.name, caller.key.tenant
                caller.admit(
                    cost_of(incoming.message, incoming.prompt_tokens, self._max_model_len())
                )
        except RequestError as error:
            await abort_with(context, error)
        await self._engine.intake.reservations.until_free()
        buffer, finish = DeltaBuffer(), None
        parent = None
        if self._engine.intake.tracing is not None:
            parent = dict(_context(context.invocation_metadata() or ()))
        self._engine.intake.submit(incoming, buffer, 0, owner=owner, parent=parent)
        try:
            while True:
                await buffer.ready.wait()
                deltas = buffer.take()
                finish = deltas.finished[0].finish if deltas.finished else None
                if finish is not None and finish.reason == pb.FINISH_REASON_ERROR:
                    await abort_with(context, request_error(finish.error))
                yield response_of(incoming.message, deltas, finish)
                if finish is not None:
                    return
        finally:
            self._engine.endings.abort(buffer, 0)
            if caller is not None:
                usage = usage_of(finish or finish_in(buffer))
                caller.used = usage.prompt_tokens + usage.completion_tokens

    async def Pool(  # noqa: N802
        self, request: pb.GenerateRequest | bytes, context: Context
    ) -> pb.PoolResponse:
        """The result of one request without output."""
        try:
            incoming = _incoming(request)
            if not incoming.message.HasField("pooling"):
                raise invalid("pooling", "pooling is required; for text call Generate")
        except RequestError as error:
            await abort_with(context, error)
        response = pb.PoolResponse()
        async for last in self.Generate(request, context):
            if last.finish.reason == pb.FINISH_REASON_ABORT:
                await abort_with(context, RequestError(Code.CANCELLED, "the request was aborted"))
            response.request_id = last.request_id
            response.values.extend(unpack_floats(last.finish.pooled).tolist())
            response.usage.CopyFrom(last.finish.usage)
        return response

    async def Multiplex(  # noqa: N802
        self, requests: AsyncIterator[pb.MultiplexRequest], context: Context
    ) -> None:
        """A gateway's stream: reads its requests and writes the deltas of all of them."""
        buffer = DeltaBuffer(moves=True)
        reader = asyncio.create_task(self._read(requests, buffer))
        self._engine.intake.reservations.connect(buffer)
        self._gateways[buffer] = context.peer()
        try:
            await self._write(context, buffer, reader)
        finally:
            reader.cancel()
            del self._gateways[buffer]
            self._engine.endings.abort_all(buffer)
            self._engine.intake.reservations.disconnect(buffer)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Ends a request by id; with a key only a request of the same key."""
        caller = current_caller()
        owner = None if caller is None else caller.key.name
        return pb.AbortResponse(found=self._engine.endings.abort_by_id(request.request_id, owner))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest | bytes, context: Context
    ) -> pb.TokenizeResponse | bytes:
        """The token ids of a text or a conversation."""
        engine = self._engine
        try:
            if isinstance(request, bytes):
                return await engine.intake.helpers.tokenize(request)
            return tokenized(request, engine.tokenizer, engine.model)
        except RequestError as error:
            await abort_with(context, error)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest | bytes, context: Context
    ) -> pb.DetokenizeResponse | bytes:
        """The text of token ids."""
        engine = self._engine
        try:
            if isinstance(request, bytes):
                return await engine.intake.helpers.detokenize(request)
            return detokenized(request, engine.tokenizer, engine.model)
        except RequestError as error:
            await abort_with(context, error)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The model that this scheduler serves."""
        return self._engine.models()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.Load:  # noqa: N802
        """The load of this scheduler."""
        return self._engine.load()

    async def GetSnapshot(  # noqa: N802
        self, request: snapshot_pb.SnapshotRequest, context: Context
    ) -> snapshot_pb.Snapshot:
        """The data of a live view."""
        snapshot = await self._engine.snapshots.take(request.steps_after)
        num_open = self._engine.endings.open.by_client()
        for buffer, peer in islice(self._gateways.items(), MAX_GATEWAYS):
            asks = peer == context.peer()
            snapshot.gateways.add(peer=peer, num_open=num_open[id(buffer)], asks=asks)
        return snapshot

    def _max_model_len(self) -> int:
        """0 before the first worker is ready."""
        models = self._engine.models().models
        return int(models[0].max_model_len) if models else 0

    async def _read(
        self, requests: AsyncIterator[pb.MultiplexRequest], buffer: DeltaBuffer
    ) -> None:
        """Reads a gateway's messages.

        Raises DecodeError for bytes that are not a message, CorruptMessageError for damaged ones.
        """
        jobs = JobAdmissions()
        try:
            async for message in requests:
                buffer.received += 1
                await buffer.read.wait()  # until the gateway has read its deltas
                if message.WhichOneof("message") == "submit":
                    self._submit(message.submit, buffer, jobs)
                elif message.WhichOneof("message") == "abort":
                    self._engine.endings.abort(buffer, message.abort)
                elif message.WhichOneof("message") == "reserve":
                    if message.reserve:
                        self._engine.intake.reservations.request(buffer)
                    else:
                        self._engine.intake.reservations.end(buffer)
        finally:
            buffer.ready.set()

    def _submit(self, submit: pb.Submit, buffer: DeltaBuffer, jobs: JobAdmissions) -> None:
        try:
            incoming = _incoming(submit.request)
        except RequestError as failure:
            buffer.add_finish(submit.stream, error_finish(failure), 0)
        else:
            losses = submit.worker_losses if submit.HasField("worker_losses") else None
            parent = None
            if submit.traceparent:
                parent = {"traceparent": submit.traceparent, "tracestate": submit.tracestate}
            self._engine.intake.submit(
                incoming,
                buffer,
                submit.stream,
                submit.moved,
                worker_losses=losses,
                job=jobs.of(submit.job),
                parent=parent,
            )

    async def _write(
        self, context: Context, buffer: DeltaBuffer, reader: "asyncio.Task[None]"
    ) -> None:
        """Sends deltas and load until the gateway closes its side."""
        loop = asyncio.get_running_loop()
        models, load, sent_at, beat_at = None, None, 0.0, 0.0
        reservation = (0, False)
        timer = loop.call_soon(buffer.ready.set)
        while not reader.done():
            now = loop.time()
            response = buffer.take()
            changed = bool(response.streams or response.finished or response.prompts)
            if models is None:
                response.instance_id = self._engine.instance_id
            if (changes := self._engine.intake.reservations.changes) > 0:
                alone = changes % 2 == 1 and self._engine.intake.is_alone(buffer)
                response.reservation_changes, response.reserved = changes, alone
                changed |= reservation != (changes, alone)
                reservation = changes, alone
            if now - sent_at >= LOAD_INTERVAL:
                state = (self._engine.models(), self._engine.intake.draining)
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
            response.draining = self._engine.intake.draining
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


def _read(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """The message, or its bytes if it is too large for the event loop."""
    if len(data) > INLINE_TEXT_BYTES:
        return data
    message = decode(data)
    return data if not isinstance(message, pb.DetokenizeRequest) and expands(message) else message


async def _take_given_id(message: pb.GenerateRequest, context: Context) -> None:
    """Uses the id in the call's metadata for a request without one, and sends it back.

    The request's own id has a random end, because clients may use an id again while its request
    runs.
    """
    if message.request_id:
        return
    for name, value in context.invocation_metadata() or ():
        if name == REQUEST_ID_METADATA:
            given = str(value)
            if not 0 < len(given) <= MAX_GIVEN_ID_LENGTH or not given.isprintable():
                raise invalid(
                    REQUEST_ID_METADATA,
                    f"{REQUEST_ID_METADATA} must have 1 to {MAX_GIVEN_ID_LENGTH} printable "
                    "characters",
                )
            message.request_id = f"{given}.{secrets.token_hex(4)}"
            await context.send_initial_metadata(((REQUEST_ID_METADATA, given),))
            return


def _context(metadata: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The W3C trace context in a call's metadata."""
    for name, value in metadata:
        if name in ("traceparent", "tracestate"):
            yield name, str(value)


def _incoming(request: pb.GenerateRequest | bytes) -> IncomingRequest:
    """A request in either form; RequestError if it does not decode."""
    if not isinstance(request, bytes):
        return IncomingRequest.of(request)
    try:
        return read_request(request)
    except DecodeError as error:
        raise RequestError(Code.INVALID_ARGUMENT, UNDECODABLE) from error
