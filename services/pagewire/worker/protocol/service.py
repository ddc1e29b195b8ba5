"""The gRPC service of a worker: one step stream at a time."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.errors import Code, RequestError, invalid
from pagewire.rpc.checksums import CorruptMessageError
from pagewire.rpc.interceptors import UNDECODABLE
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, PROTOCOL_VERSION
from pagewire.v1 import worker_pb2 as pb
from pagewire.v1 import worker_pb2_grpc
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.session import Session
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.traces import Traces
from pagewire.worker.protocol.turns import Turn, Turns

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name

# Time to send the status of streams that have ended before the server stops.
SHUTDOWN_SECONDS = 0.2

_DRAINING = "this worker is shutting down; use another"
_STALLED = "this worker is stuck in a step; its log has the stacks"
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves one scheduler at a time: the stream with the newest epoch. Among schedulers that share
    this worker, the first claim wins."""

    def __init__(self) -> None:
        self._executor: StepExecutor | None = None
        self._info: pb.WorkerInfo | None = None
        self._limits: Limits | None = None
        self._masks: MaskProcesses | None = None
        self._session: Session | None = None
        # Makes spans; None without tracing.
        self.tracing: Tracing | None = None
        self._newest_epoch = 0
        self._turns = Turns(self._tell_holder)
        self._draining = False
        self._stalled = False
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(
        self,
        executor: StepExecutor,
        limits: Limits,
        info: pb.WorkerInfo,
        masks: MaskProcesses | None = None,
    ) -> None:
        """Allows streams, once the worker is warm. `info` opens each of them.

        `masks` None: sequences with a constraint fail.
        """
        self._executor, self._limits, self._info, self._masks = executor, limits, info, masks

    async def drain(self, seconds: float) -> None:
        """Refuses new streams, and waits up to `seconds` until the open one ends."""
        self._draining = True
        self._turns.end(RequestError(Code.UNAVAILABLE, _DRAINING))
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("the scheduler's stream is still open after %g s", seconds)
            if self._session is not None:
                message = f"this worker is shutting down and has waited for {seconds:g} s"
                self._session.end(RequestError(Code.DEADLINE_EXCEEDED, message))

    def set_stalled(self, stalled: bool) -> None:
        """While steps are stalled, no stream may open; an open stream ends."""
        self._stalled = stalled
        if stalled and self._session is not None:
            self._session.end(RequestError(Code.UNAVAILABLE, _STALLED))

    async def Run(  # noqa: N802, the name is gRPC's
        self, requests: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One step stream; worker.proto has the rules."""
        try:
            hello = await _hello(context)
            if hello.shares:
                session = await self._opened_in_turn(hello, context)
            else:
                session = self._open(hello)
        except RequestError as error:
            await _abort(context, error)
        traces = None if self.tracing is None else Traces(self.tracing)
        tasks = [
            asyncio.create_task(self._read(session, traces, context)),
            asyncio.create_task(session.send_heartbeats(HEARTBEAT_SECONDS)),
        ]
        try:
            # A step of an earlier stream may be stuck. If this scheduler's steps waited behind it,
            # the scheduler would treat its own sequences as the cause.
            assert self._executor is not None
            await self._executor.settled()
            await context.write(pb.RunResponse(ready=self._info))
            while (answer := await session.answers.get()) is not None:
                if isinstance(answer, pb.StepResult):
                    await context.write(pb.RunResponse(result=answer))
                    session.window.release()
                elif isinstance(answer, pb.Alive):
                    await context.write(pb.RunResponse(alive=answer))
                elif isinstance(answer, pb.Standing):
                    await context.write(pb.RunResponse(standing=answer))
                else:
                    await _abort(context, answer)
        finally:
            for task in tasks:
                task.cancel()
            if traces is not None:
                traces.close(session.received_steps)
            self._close(session)

    async def _opened_in_turn(
        self, hello: pb.Hello, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Session:
        """The session of a scheduler that shares this worker, after a claim that succeeds.

        RequestError if this worker does not accept the stream, or stops waiting.
        """
        info = self._check(hello)
        with self._turns.wait(hello.scheduler) as turn:
            claims = asyncio.create_task(self._read_claims(hello, turn, context))
            claims.add_done_callback(lambda _: turn.changed.set())
            try:
                while not claims.done():
                    await turn.changed.wait()
                    turn.changed.clear()
                    if turn.error is not None:
                        raise turn.error
                    if not claims.done():
                        standing = self._turns.standing(info.model, turn.claims)
                        await context.write(pb.RunResponse(standing=standing))
                return await claims
            except BaseException:
                if claims.done() and not claims.cancelled() and claims.exception() is None:
                    self._close(claims.result())
                claims.cancel()
                raise

    async def _read_claims(
        self, hello: pb.Hello, turn: Turn, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Session:
        """The session that the first successful claim of the scheduler opens."""
        while True:
            try:
                request = await context.read()
            except (DecodeError, CorruptMessageError) as fault:
                raise _unreadable("message", fault) from fault
            if request is grpc.aio.EOF:
                raise RequestError(Code.CANCELLED, "the scheduler waits no more")
            if request.WhichOneof("message") != "claim":
                raise invalid("message", "every message before `ready` must be a claim")
            turn.claims += 1
            if self._session is None or self._is_reopened(hello):
                return self._open(hello)
            turn.changed.set()

    def _is_reopened(self, hello: pb.Hello) -> bool:
        """Whether a stream follows a broken stream of the same scheduler."""
        assert self._session is not None
        return hello.scheduler == self._turns.holder and hello.epoch > self._session.epoch

    def _check(self, hello: pb.Hello) -> pb.WorkerInfo:
        """RequestError if this worker accepts no stream, or not this scheduler's."""
        if self._draining:
            raise RequestError(Code.UNAVAILABLE, _DRAINING)
        if self._info is None:
            raise RequestError(Code.UNAVAILABLE, "the model is still loading")
        if self._stalled:
            raise RequestError(Code.UNAVAILABLE, _STALLED)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"protocol version {hello.protocol_version}; this worker speaks "
                f"{PROTOCOL_VERSION}, use a scheduler of the same release",
            )
        return self._info

    def _open(self, hello: pb.Hello) -> Session:
        """The session of a new stream. A stream that is already open ends.

        RequestError if this worker does not accept the stream.
        """
        self._check(hello)
        assert self._limits is not None
        assert self._executor is not None
        # Epochs are not comparable, as clocks of machines differ: between schedulers that share,
        # the claim decides.
        if not hello.shares and hello.epoch <= self._newest_epoch:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"epoch {hello.epoch} is not newer than {self._newest_epoch}, which another "
                "stream opened with; open one with a newer epoch",
            )
        self._newest_epoch = max(hello.epoch, self._newest_epoch)
        name = hello.scheduler or "a scheduler"
        if self._session is not None:
            log.warning("epoch %d takes over from epoch %d", hello.epoch, self._session.epoch)
            self._session.end(
                RequestError(
                    Code.ABORTED, f"a stream with the newer epoch {hello.epoch} took this worker"
                )
            )
        else:
            log.info("%s connected, epoch %d", name, hello.epoch)
        self._session = Session(
            hello.epoch, self._limits, self._masks, hello.shares, self._executor.row_costs
        )
        self._hold(name)
        self._idle.clear()
        return self._session

    def _hold(self, scheduler: str) -> None:
        """Sends the holder of the worker to all schedulers that share it."""
        self._turns.holder = scheduler
        self._turns.tell()

    def _tell_holder(self) -> None:
        if self._session is not None and self._session.shares and self._info is not None:
            self._session.answers.put_nowait(self._turns.standing(self._info.model))

    def _close(self, session: Session) -> None:
        session.closed = True
        if self._session is session:
            log.info("the stream of epoch %d ended", session.epoch)
            self._session = None
            self._hold("")
            self._idle.set()

    async def _read(
        self,
        session: Session,
        traces: Traces | None,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Passes the steps of the stream to the executor until the stream ends."""
        assert self._executor is not None
        while True:
            await session.window.acquire()
            try:
                request = await context.read()
            except (DecodeError, CorruptMessageError) as fault:
                return self._executor.finish(session, _unreadable("message", fault))
            if request is grpc.aio.EOF:
                return self._executor.finish(session, None)
            if request.WhichOneof("message") == "trace_end":
                if traces is not None:
                    traces.end(request.trace_end.slots, session.received_steps)
                session.window.release()
                continue
            if request.WhichOneof("message") != "step":
                error = invalid("message", "every message after the first must be a step")
                return self._executor.finish(session, error)
            session.received_steps += 1
            if traces is not None:
                traces.begin(request.step)
            self._executor.step(session, request.step)


async def _hello(context: grpc.aio.ServicerContext[Any, Any]) -> pb.Hello:
    try:
        request = await context.read()
    except (DecodeError, CorruptMessageError) as error:
        raise _unreadable("hello", error) from error
    if request is grpc.aio.EOF or request.WhichOneof("message") != "hello":
        raise invalid("hello", "the first message of a stream must be hello")
    hello: pb.Hello = request.hello
    return hello


def _unreadable(field: str, error: Exception) -> RequestError:
    """The error that ends a stream after a message that cannot be read."""
    if isinstance(error, CorruptMessageError):
        log.warning("the stream ends: %s", error)
        return RequestError(Code.DATA_LOSS, str(error))
    return invalid(field, UNDECODABLE)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> None:
    await context.abort(_STATUS[error.code], error.message)
