"""The stream to one worker: it sends steps, receives results, and connects again when it breaks."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.lifecycle.logs import LatestCause
from pagewire.lifecycle.stall_detector import StallDetector
from pagewire.rpc.certificates import tls_problem
from pagewire.rpc.checksums import RUN, StreamError, open_stream, receive
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, PROTOCOL_VERSION, SILENT_HEARTBEATS
from pagewire.rpc.transport import end_call, open_channel, was_cancelled
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 0.5
# How often a step is checked within its timeout.
CHECKS_PER_STEP = 8
# If a worker does not serve within this many seconds, the link opens a new connection: on a damaged
# one its answer may never arrive.
HANDSHAKE_SECONDS = 8.0
# The worker ends a stream with these codes when another scheduler took it over, or when its drain
# time is over.
EXPLAINED_CODES = (grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class WorkerEvents(Protocol):
    """The owner of a link; all calls are made on the event loop."""

    def on_ready(self, link: "WorkerLink", info: pb.WorkerInfo) -> None:
        """The worker is fresh: every slot is empty and the next step has number 1."""
        ...

    def on_result(self, link: "WorkerLink", result: pb.StepResult) -> None:
        """The result of the oldest step in flight; ValueError if it cannot be that."""
        ...

    def on_draining(self, link: "WorkerLink") -> None:
        """The worker accepts no more sequences; call `leave` once it has none. May be repeated."""
        ...

    def on_serving(self, link: "WorkerLink") -> None:
        """The draining worker accepts sequences again."""
        ...

    def on_lost(self, link: "WorkerLink") -> None:
        """The stream of a ready worker has ended; no more results arrive."""
        ...


class WorkerTurns(Protocol):
    """Decides which of the workers that schedulers share this scheduler claims."""

    name: str

    def on_standing(self, link: "WorkerLink", standing: pb.Standing) -> None:
        """The worker's holder or a waiting scheduler has changed; ValueError for another model."""
        ...

    def on_gone(self, link: "WorkerLink") -> None:
        """The stream has ended: the worker's standing is unknown."""
        ...


class WorkerLink:
    """Keeps one worker connected while `run` runs, or waits for it where schedulers share it."""

    def __init__(
        self,
        address: str,
        events: WorkerEvents,
        credentials: Credentials = NO_CREDENTIALS,
        step_timeout: float = 60.0,
        turns: WorkerTurns | None = None,
    ) -> None:
        """`address` is host:port or unix:PATH; a step may take `step_timeout` seconds.

        Without `turns` the worker is this scheduler's alone, and a new stream takes it over.
        """
        self._turns = turns
        self.released = False
        self._credentials = credentials
        self.address = address
        self._step_timeout = step_timeout
        self._sent = self._answered = self._received = 0
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._events = events
        self.retired = False
        self.claims_sent = 0
        self._end_stream: Callable[[], object] = lambda: None
        self._grace_over: asyncio.TimerHandle | None = None
        self.connected = False
        # This scheduler ends the link, as it stops.
        self.closing = False
        # The latest stream ended for a known reason that has nothing to do with its sequences.
        self.end_explained = False
        # The latest stream ended because a step took too long: the connection was sound.
        self.step_timed_out = False
        self._leaving = False
        self._serving = True
        self._outgoing: deque[pb.RunRequest | None] = deque()
        self._outgoing_filled = asyncio.Event()
        self._fault = LatestCause()  # why there is no connection

    def send(self, step: pb.Step) -> None:
        """Sends a step; run-ahead bounds the steps that wait in the outgoing queue."""
        self._sent += 1
        self._outgoing.append(pb.RunRequest(step=step))
        self._outgoing_filled.set()

    def end_trace(self, slot: int) -> None:
        """Reports to the worker that the traced sequence in a slot has left it."""
        self._outgoing.append(pb.RunRequest(trace_end=pb.TraceEnd(slots=[slot])))
        self._outgoing_filled.set()

    def leave(self) -> None:
        """Ends the stream after the sent steps; connects again once the worker serves."""
        self._leaving = True
        self._outgoing.append(None)
        self._outgoing_filled.set()

    def retire(self) -> None:
        """Drains a connected worker, and does not connect again."""
        self.retired = True
        if self.connected:
            self._events.on_draining(self)

    def claim(self) -> None:
        """Claims the worker, which is free."""
        self.claims_sent += 1
        self._outgoing.append(pb.RunRequest(claim=pb.Claim()))
        self._outgoing_filled.set()

    def release(self, grace: float) -> None:
        """Gives the worker up, and waits for it again.

        Its sequences may end within `grace` seconds; those that are left run elsewhere.
        """
        if self.connected and not self.released:
            self.released = True
            self._events.on_draining(self)
            self._grace_over = asyncio.get_running_loop().call_later(grace, self._end_stream)

    def _end_explained_stream(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self.end_explained = True
        call.cancel()

    async def run(self) -> None:
        """Connects again and again, with back-off.

        Ends when it is cancelled or retired, or when another scheduler takes the worker over.
        """
        backoff = FIRST_BACKOFF
        while not self.retired:
            started = time.monotonic()
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ABORTED and self._turns is None:
                    log.error(
                        "worker %s now serves another scheduler (%s); restart this scheduler to "
                        "take it back",
                        self.address,
                        error.details(),
                    )
                    return
                self._report(error.code(), error.details() or "")
            except asyncio.CancelledError:
                # gRPC raises this too when either side cancels a call.
                if not was_cancelled() and not self.released:
                    self._report(grpc.StatusCode.CANCELLED, "the stream was cancelled")
            except TimeoutError:
                self._report(grpc.StatusCode.UNAVAILABLE, "it does not serve yet")
            except StreamError as error:
                log.warning("worker %s: the stream is closed: %s", self.address, error)
            except ValueError as error:
                log.error("worker %s broke the protocol: %s", self.address, error)
            if was_cancelled():  # gRPC may answer a cancellation by an error of the call
                return
            if time.monotonic() - started > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF)

    def _report(self, code: grpc.StatusCode, details: str) -> None:
        """Logs why there is no connection, at debug unless the reason changes."""
        problem = tls_problem(details)
        if problem is None and code is not grpc.StatusCode.UNAVAILABLE:
            problem = details
        # A worker that cannot be reached may be starting; one that is lost was reported.
        reason = problem or "not reachable yet"
        new = logging.INFO if problem is None else logging.WARNING
        level = self._fault.level(reason, new)
        log.log(level, "worker %s: %s (%s)", self.address, reason, code.name)
        log.debug("worker %s: %s", self.address, details)

    async def _serve(self) -> None:
        """One connection, until its stream ends."""
        async with open_channel(self.address, self._credentials) as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            )
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                while not await _serving(health):
                    pass
            self._serving = True
            call = open_stream(channel, RUN, self._credentials.metadata)
            try:
                await self._converse(call, health)
            finally:
                end_call(call)

    async def _converse(
        self, call: grpc.aio.StreamStreamCall[Any, Any], health: grpc.aio.UnaryStreamCall[Any, Any]
    ) -> None:
        """One stream, from its hello to its end."""
        self._outgoing.clear()
        self.claims_sent = 0
        self._leaving = self.end_explained = self.step_timed_out = self.released = False
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            hello = pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=time.time_ns())
            if self._turns is not None:
                hello.scheduler, hello.shares = self._turns.name, True
            await call.write(pb.RunRequest(hello=hello))
            message = await receive(call)
        tasks = [
            asyncio.create_task(each) for each in (self._write(call), self._watch(health, call))
        ]
        try:
            if self._turns is not None:
                message = await self._wait_for_turn(call, message, self._turns)
            if message is grpc.aio.EOF:
                await self._raise_status(call)
            if message is grpc.aio.EOF or message.WhichOneof("message") != "ready":
                raise ValueError("its first message is not `ready`")
            await self._hold(call, message.ready)
        finally:
            for task in tasks:
                task.cancel()
            if self._turns is not None:
                self._turns.on_gone(self)

    async def _wait_for_turn(
        self, call: grpc.aio.StreamStreamCall[Any, Any], message: Any, turns: WorkerTurns
    ) -> Any:
        """Reports the worker's standing, until a claim succeeds or the stream ends.

        Returns the stream's next message, or its end.
        """
        while message is not grpc.aio.EOF and message.HasField("standing"):
            turns.on_standing(self, message.standing)
            message = await receive(call)
        return message

    async def _hold(self, call: grpc.aio.StreamStreamCall[Any, Any], info: pb.WorkerInfo) -> None:
        """The stream from `ready` to its end."""
        self._sent = self._answered = self._received = 0
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._end_stream = partial(self._end_explained_stream, call)
        self._events.on_ready(self, info)
        self.connected = True
        self._fault.reported = ""
        if not self._serving:
            self._events.on_draining(self)
        tasks = [
            asyncio.create_task(each)
            for each in (self._time_steps(call), self._time_heartbeats(call))
        ]
        try:
            while (message := await receive(call)) is not grpc.aio.EOF:
                self._received += 1
                if message.HasField("alive"):
                    self._check_reading(message.alive)
                    continue
                if self._turns is not None and message.HasField("standing"):
                    self._turns.on_standing(self, message.standing)
                    continue
                self._answered += 1
                self._events.on_result(self, message.result)
            await self._raise_status(call)
            self.end_explained = True
            if not self._leaving:
                raise ValueError("it ended the stream")
        finally:
            self.connected = False
            self.end_explained |= self.retired
            self.closing = was_cancelled()
            if self._grace_over is not None:
                self._grace_over.cancel()
            for task in tasks:
                task.cancel()
            self._events.on_lost(self)

    def _check_reading(self, alive: pb.Alive) -> None:
        """Fails if the worker reads no more steps; it reports the steps read once a second."""
        if self._unread.poll(alive.received_steps, self._sent > alive.received_steps):
            raise StreamError(
                f"the worker stopped reading at step {alive.received_steps} of {self._sent}"
            )

    async def _watch(
        self, health: grpc.aio.UnaryStreamCall[Any, Any], call: grpc.aio.StreamStreamCall[Any, Any]
    ) -> None:
        """Drains the worker while its health is not SERVING."""
        try:
            while True:
                serving = await _serving(health)
                if health.done():
                    return  # the worker has no health service
                self._serving = serving
                if not self.connected:
                    continue  # it waits for its turn
                if not serving:
                    log.info("worker %s is draining", self.address)
                    self._events.on_draining(self)
                elif not self.retired and not self.released:
                    self._events.on_serving(self)
        except (grpc.aio.AioRpcError, ValueError):
            call.cancel()  # without its health stream, a drain of the worker would be missed

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            while True:
                while self._outgoing:
                    request = self._outgoing.popleft()
                    if request is None:
                        await call.done_writing()
                        return
                    await call.write(request)
                self._outgoing_filled.clear()
                await self._outgoing_filled.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side raises the reason

    async def _time_steps(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Ends the stream when the oldest step in flight takes longer than its timeout."""
        stall = StallDetector(CHECKS_PER_STEP)
        while not stall.poll(self._answered, self._sent > self._answered):  # noqa: ASYNC110
            await asyncio.sleep(self._step_timeout / CHECKS_PER_STEP)
        log.error(
            "worker %s has not answered step %d within its timeout of %g s",
            self.address,
            self._answered + 1,
            self._step_timeout,
        )
        self.step_timed_out = True
        call.cancel()

    async def _time_heartbeats(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Ends the stream when the worker sends neither results nor heartbeats."""
        stall = StallDetector(SILENT_HEARTBEATS)
        while not stall.poll(self._received):  # noqa: ASYNC110
            await asyncio.sleep(HEARTBEAT_SECONDS)
        seconds = SILENT_HEARTBEATS * HEARTBEAT_SECONDS
        log.error("worker %s has sent nothing for %g s", self.address, seconds)
        call.cancel()

    async def _raise_status(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Raises the error of a stream that has ended, unless its status is OK."""
        code, details = await call.code(), await call.details()
        if code is not grpc.StatusCode.OK:
            self.end_explained = code in EXPLAINED_CODES
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), details
            )


async def _serving(health: grpc.aio.UnaryStreamCall[Any, Any]) -> bool:
    """The worker's next health message; True for one without a health service."""
    try:
        message = await health.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return True
        raise
    if message is grpc.aio.EOF:
        raise ValueError("it ended the health stream")
    if message is None:  # gRPC has logged why
        raise ValueError("its health message does not decode")
    return bool(message.status == health_pb2.HealthCheckResponse.SERVING)
