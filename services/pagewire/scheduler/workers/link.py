"""The stream to one worker: steps down, tokens up, and reconnecting when it breaks."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence as Collection
from typing import Any, Protocol

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.lifecycle.stall_detector import StallDetector
from pagewire.packing import pack
from pagewire.rpc.checksums import RUN, StreamError, open_stream, receive
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, PROTOCOL_VERSION, SILENT_HEARTBEATS
from pagewire.rpc.transport import end_call, open_channel
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.sequence import Sequence
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 0.5
LOOKS_AT_A_STEP = 8  # in the time that it has
# A worker that does not serve yet is asked again on a new connection after so many seconds: on a
# damaged one its answer may never come.
HANDSHAKE_SECONDS = 8.0
# How a worker ends a stream because another scheduler took it over, or its time to drain is over.
SAY_WHY = (grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class WorkerEvents(Protocol):
    """What the owner of a link is told; all calls come on the event loop."""

    def on_ready(self, link: "WorkerLink", info: pb.WorkerInfo) -> None:
        """The worker is fresh: every slot is empty and the next step has number 1."""
        ...

    def on_result(self, link: "WorkerLink", result: pb.StepResult) -> None:
        """The answer to the oldest step in flight; ValueError for one that it cannot be."""
        ...

    def on_draining(self, link: "WorkerLink") -> None:
        """The worker should get no more sequences, and `leave` once it has none; may come again."""
        ...

    def on_serving(self, link: "WorkerLink") -> None:
        """The worker that was draining takes sequences again."""
        ...

    def on_lost(self, link: "WorkerLink") -> None:
        """The worker was ready and is no longer; no answer comes any more."""
        ...


class WorkerLink:
    """Keeps one worker connected. `run` lasts until it is cancelled or retired."""

    def __init__(
        self,
        address: str,
        events: WorkerEvents,
        credentials: Credentials = NO_CREDENTIALS,
        step_timeout: float = 60.0,
    ) -> None:
        """`address` is host:port or unix:PATH; steps have `step_timeout` seconds each."""
        self._credentials = credentials
        self.address = address
        self._step_timeout = step_timeout
        self._sent = self._answered = self._received = 0
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._events = events
        self.retired = False
        self.connected = False
        # The latest stream ended for a reason that is known, and that no sequence is.
        self.has_said_why = False
        # It ended because a step did not: that is no connection that broke.
        self.hung = False
        self._leaving = False
        self._outgoing: deque[pb.RunRequest | None] = deque()
        self._outgoing_filled = asyncio.Event()
        self._reported = ""

    def send(self, step: pb.Step) -> None:
        """Sends a step; run-ahead bounds how many wait here."""
        self._sent += 1
        self._outgoing.append(pb.RunRequest(step=step))
        self._outgoing_filled.set()

    def leave(self) -> None:
        """Ends the stream after the steps sent so far; connects again once the worker serves."""
        self._leaving = True
        self._outgoing.append(None)
        self._outgoing_filled.set()

    def retire(self) -> None:
        """Drains the worker, if it is connected, and does not connect again."""
        self.retired = True
        if self.connected:
            self._events.on_draining(self)

    async def run(self) -> None:
        """Connects, serves and reconnects with back-off; ends if another scheduler takes over."""
        backoff = FIRST_BACKOFF
        while not self.retired:
            started = time.monotonic()
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ABORTED:
                    log.error(
                        "worker %s now serves another scheduler (%s); restart this scheduler to "
                        "take it back",
                        self.address,
                        error.details(),
                    )
                    return
                self._report(error.code(), error.details() or "")
            except asyncio.CancelledError:
                # gRPC raises this, too, when a call was cancelled, by whichever side.
                if not _cancelled():
                    self._report(grpc.StatusCode.CANCELLED, "the stream was cancelled")
            except TimeoutError:
                self._report(grpc.StatusCode.UNAVAILABLE, "it does not serve yet")
            except StreamError as error:
                log.warning("worker %s: the stream breaks: %s", self.address, error)
            except ValueError as error:
                log.error("worker %s broke the protocol: %s", self.address, error)
            if _cancelled():  # gRPC may answer a cancellation by an error of the call
                return
            if time.monotonic() - started > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF)

    def _report(self, code: grpc.StatusCode, details: str) -> None:
        """Says why there is no connection: once, and again when the reason is another."""
        reason = details if code is not grpc.StatusCode.UNAVAILABLE else "not there yet"
        level = logging.DEBUG if reason == self._reported else logging.WARNING
        self._reported = reason
        log.log(level, "worker %s: %s (%s)", self.address, reason, code.name)
        log.debug("worker %s: %s", self.address, details)

    async def _serve(self) -> None:
        """One connection, until it breaks or the worker is left."""
        async with open_channel(self.address, self._credentials) as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            )
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                while not await _serving(health):
                    pass
            call = open_stream(channel, RUN, self._credentials.metadata)
            try:
                await self._converse(call, health)
            finally:
                end_call(call)

    async def _converse(
        self, call: grpc.aio.StreamStreamCall[Any, Any], health: grpc.aio.UnaryStreamCall[Any, Any]
    ) -> None:
        """One stream, from its hello to its end."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            hello = pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=time.time_ns())
            await call.write(pb.RunRequest(hello=hello))
            ready = await receive(call)
            if ready is grpc.aio.EOF:
                await self._raise_status(call)
        if ready is grpc.aio.EOF or ready.WhichOneof("message") != "ready":
            raise ValueError("its first message is not `ready`")
        self._outgoing.clear()
        self._leaving = self.has_said_why = self.hung = False
        self._sent = self._answered = self._received = 0
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._events.on_ready(self, ready.ready)
        self.connected = True
        self._reported = ""
        work = (
            self._write(call),
            self._watch(health, call),
            self._time_steps(call),
            self._listen_for_silence(call),
        )
        tasks = [asyncio.create_task(each) for each in work]
        try:
            while (message := await receive(call)) is not grpc.aio.EOF:
                self._received += 1
                if message.HasField("alive"):
                    self._check_reading(message.alive)
                    continue
                self._answered += 1
                self._events.on_result(self, message.result)
            await self._raise_status(call)
            self.has_said_why = True
            if not self._leaving:
                raise ValueError("it ended the stream")
        finally:
            self.connected = False
            self.has_said_why |= self.retired
            for task in tasks:
                task.cancel()
            self._events.on_lost(self)

    def _check_reading(self, alive: pb.Alive) -> None:
        """Steps that the worker does not read are lost; it says once a second how many it has."""
        if self._unread.poll(alive.received_steps, self._sent > alive.received_steps):
            raise StreamError(f"of {self._sent} steps it has read {alive.received_steps}")

    async def _watch(
        self, health: grpc.aio.UnaryStreamCall[Any, Any], call: grpc.aio.StreamStreamCall[Any, Any]
    ) -> None:
        """Drains the worker while it says that it does not serve."""
        try:
            while True:
                serving = await _serving(health)
                if health.done():
                    return  # it knows no health checking
                if not serving:
                    log.info("worker %s drains", self.address)
                    self._events.on_draining(self)
                elif not self.retired:
                    self._events.on_serving(self)
        except (grpc.aio.AioRpcError, ValueError):
            call.cancel()  # it may have broken alone, and the worker's drain must be noticed

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
            return  # the reader sees why

    async def _time_steps(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Gives the worker up when it does not answer the oldest step in flight in time."""
        stall = StallDetector(LOOKS_AT_A_STEP)
        while not stall.poll(self._answered, self._sent > self._answered):  # noqa: ASYNC110
            await asyncio.sleep(self._step_timeout / LOOKS_AT_A_STEP)
        log.error(
            "worker %s has not answered step %d for %g s",
            self.address,
            self._answered + 1,
            self._step_timeout,
        )
        self.hung = True
        call.cancel()

    async def _listen_for_silence(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Gives the worker up when it says nothing, not even that it is alive."""
        stall = StallDetector(SILENT_HEARTBEATS)
        while not stall.poll(self._received):  # noqa: ASYNC110 - it looks at silence
            await asyncio.sleep(HEARTBEAT_SECONDS)
        seconds = SILENT_HEARTBEATS * HEARTBEAT_SECONDS
        log.error("worker %s: no sign of life for %g s", self.address, seconds)
        call.cancel()

    async def _raise_status(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Raises how the stream has ended, unless that is its regular end."""
        code, details = await call.code(), await call.details()
        if code is not grpc.StatusCode.OK:
            self.has_said_why = code in SAY_WHY
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), details
            )


def _cancelled() -> bool:
    """Whether somebody wants the task that asks to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _serving(health: grpc.aio.UnaryStreamCall[Any, Any]) -> bool:
    """What a worker says next of its health; one that knows no health checking is well."""
    try:
        message = await health.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return True
        raise
    if message is grpc.aio.EOF:
        raise ValueError("it ended health checking")
    if message is None:  # gRPC has logged why
        raise ValueError("its health does not decode")
    return bool(message.status == health_pb2.HealthCheckResponse.SERVING)


def encode_step(plan: StepPlan) -> pb.Step:
    """A planned step as it travels; to be called before anything else changes the sequences."""
    step = pb.Step(step=plan.number)
    if plan.starts:
        step.starts.extend(_encode_start(sequence) for sequence in plan.starts)
    if plan.append_slots:
        step.append_slots = pack(plan.append_slots)
        step.append_blocks = pack(plan.append_blocks)
    if plan.prefill_slots:
        step.prefill_slots = pack(plan.prefill_slots)
        step.prefill_counts = pack(plan.prefill_counts)
    if plan.decode_changed:
        step.decode_slots = pack(plan.decode_slots)
    if plan.copies is not None:
        step.saved_blocks = pack(plan.copies.saved)
        step.saved_host_blocks = pack(plan.copies.saved_host)
        step.loaded_host_blocks = pack(plan.copies.loaded_host)
        step.loaded_blocks = pack(plan.copies.loaded)
    if plan.groups_changed:
        step.group_sizes = pack([len(group.slots) for group in plan.groups])
        step.group_blocks = pack([group.blocks for group in plan.groups])
        step.group_slots = pack([slot for group in plan.groups for slot in group.slots])
    return step


def _encode_start(sequence: Sequence) -> pb.SequenceStart:
    sampling = sequence.sampling
    stop_ids: Collection[int] = sequence.stop_ids if sampling.min_tokens else ()
    return pb.SequenceStart(
        slot=sequence.slot,
        token_ids=pack(np.concatenate([sequence.prompt, np.array(sequence.output, np.int32)])),
        num_generated=sequence.num_generated,
        num_computed=sequence.num_computed,
        blocks=pack(sequence.blocks),
        copied_block=sequence.copied_block,
        sampling=pb.SlotSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_token_ids=stop_ids,
            logprobs=sampling.logprobs,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=sampling.bias_ids,
            biases=sampling.biases,
        ),
    )
