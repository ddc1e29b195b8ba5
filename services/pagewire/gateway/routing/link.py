"""The gateway's stream to one scheduler: requests up, one message of deltas a step down."""

import asyncio
import logging
import random
import time
from collections import deque
from itertools import repeat
from typing import Any, Protocol

import grpc

from pagewire.errors import Code, RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import CandidateReader
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.lifecycle.stall_detector import StallDetector
from pagewire.packing import unpack_unsigned
from pagewire.rpc.checksums import MULTIPLEX, StreamError, open_stream, receive
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, SILENT_HEARTBEATS
from pagewire.rpc.transport import end_call, open_channel
from pagewire.suspicion import Loss
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

FIRST_BACK_OFF = 0.1  # seconds, doubled by each failure
LAST_BACK_OFF = 0.5


class Owner(Protocol):
    """Who is told what becomes of a link and of the generations on it."""

    @property
    def on_trial(self) -> bool:
        """Whether every message is worth a call of `link_changed`."""
        ...

    def link_changed(self, link: "Link") -> None:
        """The link's load, models or readiness changed."""

    def link_lost(self, link: "Link", generations: list[Generation], loss: Loss | None) -> None:
        """The stream broke; these had not ended. There is no loss where the scheduler drained, or
        none was connected."""

    def link_returned(self, link: "Link") -> None:
        """It is known what became of the process that was lost."""

    def generation_ended(self, link: "Link", generation: Generation, finish: pb.Finish) -> None:
        """The scheduler ended a generation that is still wanted."""


class Link:
    """One scheduler: its stream, reconnected until `close`, and what it last said of itself."""

    def __init__(
        self,
        target: str,
        owner: Owner,
        metrics: GatewayMetrics,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._credentials = credentials
        self.target = target
        self.connected = False
        self.draining = False
        self.leaving = False  # its address is gone from DNS: no new requests
        self.models: dict[str, pb.Model] = {}
        self.load = pb.Load()
        # How often it has gained a worker: what it could not run before that, it may run now.
        self.returns = 0
        # Of the process: since when it has lived without one that another gateway tried there.
        self.instance = ""
        self.lived_since = 0.0
        # Odd while some gateway has it alone, and whether this one does.
        self.solitudes = 0
        self.alone = False
        # Not known yet whether that was a process or a connection.
        self._loss: Loss | None = None
        self._owner = owner
        self._metrics = metrics
        self._others = 0
        self._open: dict[int, Generation] = {}
        self._streams: dict[Generation, int] = {}
        self._next_stream = 0
        # Messages, and as (stream, generation) what is to be submitted.
        self._outbox: deque[pb.MultiplexRequest | tuple[int, Generation]] = deque()
        self._outbox_filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._received = self._sent = 0
        self._silent = False
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._unread_looked = 0.0

    @property
    def ready(self) -> bool:
        """Whether new requests may be sent."""
        takes_requests = self.connected and not self.draining and not self.leaving
        return takes_requests and self.load.ready_workers > 0

    @property
    def reserved(self) -> bool:
        """Whether some gateway has it alone: nothing else may be sent for some seconds."""
        return self.solitudes % 2 == 1

    def serves(self, generation: Generation) -> bool:
        """Whether it is ready, has the model, and has not refused the generation, or has found a
        worker since it handed it back."""
        return (
            self.ready
            and generation.model in self.models
            and self.target not in generation.refused_by
            and generation.handed_back.get(self.target) != self.returns
        )

    def takes(self, generation: Generation) -> bool:
        """Whether a generation may be sent to run there among others."""
        return not self.reserved and self.serves(generation)

    def has(self, generation: Generation) -> bool:
        """Whether a generation is open here."""
        return generation in self._streams

    @property
    def idle(self) -> bool:
        """Whether no generation is open here."""
        return not self._open

    @property
    def requests(self) -> int:
        """Requests that it has: those open here, and those of others by its latest report."""
        return len(self._open) + self._others

    @property
    def pressure(self) -> float:
        """Requests a worker."""
        return self.requests / max(1, self.load.ready_workers)

    def generations(self) -> list[Generation]:
        """Those open here and still wanted."""
        return [generation for generation in self._open.values() if not generation.closed]

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.create_task(self._run(), name=f"link {self.target}")

    async def close(self) -> None:
        """Ends the stream, which aborts what is open on it."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, generation: Generation) -> None:
        """Sends a generation, from its beginning or from where an earlier attempt ended."""
        stream = self._free_stream()
        self._open[stream] = generation
        self._streams[generation] = stream
        self._send((stream, generation))

    def abort(self, generation: Generation) -> bool:
        """Aborts a generation at the scheduler; False if it is not open here."""
        stream = self._streams.get(generation)
        if stream is None:
            return False
        self._send(pb.MultiplexRequest(abort=stream))
        return True

    def ask_for_solitude(self, wanted: bool) -> None:
        """Asks for the scheduler alone, or gives that up; see `alone`."""
        self._send(pb.MultiplexRequest(solitude=wanted))

    def explain(self, loss: Loss, instance: str = "") -> None:
        """A loss is decided: by the process that answers now, or by time, as none does."""
        if loss.ended is None or instance:
            loss.resolve(instance)
        if self._loss is loss:
            if instance:
                self._loss = None
            self._owner.link_returned(self)

    def _free_stream(self) -> int:
        """A number no open generation has; one is free again once its Finish was received."""
        while True:
            self._next_stream = (self._next_stream + 1) % 2**32
            if self._next_stream not in self._open:
                return self._next_stream

    def _send(self, item: pb.MultiplexRequest | tuple[int, Generation]) -> None:
        self._outbox.append(item)
        self._outbox_filled.set()

    def _message(
        self, item: pb.MultiplexRequest | tuple[int, Generation]
    ) -> pb.MultiplexRequest | None:
        """Made when it is sent, for requests may be large; None for one aborted before that."""
        if isinstance(item, pb.MultiplexRequest):
            return None if item.HasField("abort") and item.abort not in self._open else item
        stream, generation = item
        if generation.closed:
            del self._open[stream]
            del self._streams[generation]
            return None
        message = pb.MultiplexRequest()
        message.submit.stream = stream
        message.submit.request = generation.next_attempt()
        message.submit.moved = generation.moved
        losses = generation.worker_losses
        if losses is not None and losses[1] == len(generation.tokens):
            message.submit.worker_losses.CopyFrom(losses[0])
        return message

    async def _run(self) -> None:
        back_off = FIRST_BACK_OFF
        while True:
            reason = "the scheduler closed the stream"
            try:
                await self._session()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                # gRPC also raises this when the other side cancels the call.
                reason = "the scheduler cancelled the stream"
                if self._silent:
                    reason = f"no sign of life for {SILENT_HEARTBEATS * HEARTBEAT_SECONDS:g} s"
            except StreamError as error:
                reason = str(error)
            except Exception:
                reason = "a message could not be handled"
                log.exception("scheduler %s", self.target)
            if self._closing:  # gRPC may answer a cancellation by an error of the call
                return
            if self.connected:
                log.warning("scheduler %s lost: %s", self.target, reason)
                back_off = FIRST_BACK_OFF
            else:
                log.debug("scheduler %s not reached: %s", self.target, reason)
            self._forget()
            await asyncio.sleep(back_off * random.uniform(0.5, 1.0))
            back_off = min(2 * back_off, LAST_BACK_OFF)

    async def _session(self) -> None:
        # A channel of its own for each attempt: the back-off is ours alone, not also gRPC's.
        async with open_channel(self.target, self._credentials) as channel:
            call = open_stream(channel, MULTIPLEX, self._credentials.metadata)
            self._sent = 0
            self._unread = StallDetector(SILENT_HEARTBEATS)
            tasks = [
                asyncio.create_task(self._send_all(call)),
                asyncio.create_task(self._listen_for_silence(call)),
            ]
            try:
                while (response := await receive(call)) is not grpc.aio.EOF:
                    self._receive(response)
            finally:
                for task in tasks:
                    task.cancel()
                end_call(call)
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen_for_silence(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Gives a stream up on which nothing comes, whether or not anything is open on it."""
        self._silent = False
        stall = StallDetector(SILENT_HEARTBEATS)
        while not stall.poll(self._received):  # noqa: ASYNC110 - it looks at silence
            await asyncio.sleep(HEARTBEAT_SECONDS)
        self._silent = True
        call.cancel()

    async def _send_all(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            while self._outbox:
                message = self._message(self._outbox.popleft())
                if message is not None:
                    self._sent += 1
                    await call.write(message)
            self._outbox_filled.clear()
            await self._outbox_filled.wait()

    def _forget(self) -> None:
        """Drops the state of a stream that is over and hands its generations back."""
        loss = Loss(self.instance) if self.connected and not self.draining else None
        if self.connected:
            self._loss = loss
        self.connected = self.draining = self.alone = False
        self.load = pb.Load()
        self._others = 0
        self._outbox.clear()
        orphans = self.generations()
        self._open.clear()
        self._streams.clear()
        self._owner.link_lost(self, orphans, loss)
        self.solitudes = 0

    def _receive(self, response: pb.MultiplexResponse) -> None:
        self._received += 1
        if response.draining and not self.draining:
            log.info("scheduler %s drains", self.target)
            self.draining = True
        if response.streams:
            self._deliver(response)
        for ended in response.finished:
            self._finish(ended)
        if response.HasField("models"):
            if response.models.models:  # none before it has seen a worker: it serves what it did
                self.models = {model.id: model for model in response.models.models}
            if not self.connected:
                self._connect(response.instance_id)
            served = ", ".join(sorted(self.models)) or "no model yet"
            log.info("scheduler %s is connected and serves %s", self.target, served)
        if response.HasField("load"):
            self.returns += response.load.ready_workers > self.load.ready_workers
            self.load = response.load
            reported = response.load.waiting + response.load.running
            self._others = max(0, reported - len(self._open))
            if response.HasField("received"):
                self._check_reading(response.received)
        changed = response.HasField("models") or response.HasField("load") or response.draining
        if (response.solitudes, response.alone) != (self.solitudes, self.alone):
            self._note_solitude(response)
            changed = True
        if changed or self._owner.on_trial:
            self._owner.link_changed(self)

    def _check_reading(self, received: int) -> None:
        """Messages that the scheduler does not read are lost: it says often how many it has."""
        now = asyncio.get_running_loop().time()
        if now - self._unread_looked < 0.9 * HEARTBEAT_SECONDS:
            return
        self._unread_looked = now
        if self._unread.poll(received, self._sent > received):
            raise StreamError(f"of {self._sent} messages it has read {received}")

    def _connect(self, instance: str) -> None:
        self.connected = True
        self.instance = instance
        self.lived_since = time.monotonic()
        if self._loss is not None:
            self.explain(self._loss, instance or "unknown")

    def _note_solitude(self, response: pb.MultiplexResponse) -> None:
        if response.solitudes != self.solitudes:
            self.returns += 1  # what it gave back for that, it may run now
            if not self.alone and response.solitudes % 2 == 0:
                self.lived_since = time.monotonic()  # another gateway tried one there
        self.solitudes, self.alone = response.solitudes, response.alone

    def _deliver(self, response: pb.MultiplexResponse) -> None:
        """Hands each entry its slice of the tokens and the text. This is the hot path."""
        now = time.perf_counter()
        all_tokens, all_text = response.token_ids, response.text
        generations = self._open
        streams = unpack_unsigned(response.streams).tolist()
        candidates = CandidateReader(response) if response.candidate_counts else None
        token_at = text_at = 0
        for stream, index, count, size, prompt, width in zip(
            streams,
            unpack_unsigned(response.indices).tolist(),
            response.token_counts or repeat(1, len(streams)),
            unpack_unsigned(response.text_sizes).tolist(),
            response.prompt_tokens or repeat(0, len(streams)),
            response.candidate_counts or repeat(0, len(streams)),
            strict=True,
        ):
            tokens = all_tokens[token_at : token_at + 4 * count]
            text = all_text[text_at : text_at + size]
            token_at += 4 * count
            text_at += size
            logprobs = candidates.take(count, width) if candidates and width else None
            generation = generations.get(stream)
            if generation is None or generation.closed:
                continue
            if prompt and not generation.prompt_tokens:
                generation.prompt_tokens = prompt
                self._metrics.prompt_tokens.inc(prompt)
            if index == len(generation.tokens):
                if logprobs and generation.logprobs is not None:
                    generation.logprobs.extend(logprobs)
                generation.extend(tokens, text, now)
            else:
                self._out_of_order(stream, generation, index, count)
        self._metrics.generated_tokens.inc(len(all_tokens) // 4)

    def _out_of_order(self, stream: int, generation: Generation, index: int, count: int) -> None:
        """Drops a delta that was received before; fails the request for one that was lost."""
        held = len(generation.tokens)
        log.error(
            "scheduler %s, stream %d: tokens %d to %d came when %d were held",
            self.target,
            stream,
            index,
            index + count,
            held,
        )
        if index + count > held:
            generation.closed = True
            self.abort(generation)
            generation.fail(RequestError(Code.INTERNAL, "the scheduler's output has a gap"))

    def _finish(self, ended: pb.StreamFinish) -> None:
        generation = self._open.pop(ended.stream, None)
        if generation is None:
            log.error("scheduler %s finished unknown stream %d", self.target, ended.stream)
            return
        del self._streams[generation]
        if generation.closed:
            generation.note_use(ended.finish)
        else:
            self._owner.generation_ended(self, generation, ended.finish)
