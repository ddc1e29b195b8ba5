"""The gateway's state of one scheduler, and the generations that run there."""

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

from pagewire.errors import Code, RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.connection import LAST_BACK_OFF, Connection
from pagewire.gateway.routing.delivery import MisplacedDelta, deliver, deliver_prompts
from pagewire.lifecycle.logs import LatestCause, fields
from pagewire.rpc.certificates import tls_problem
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.suspicion import Loss
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# A generation that has lost this many schedulers waits this long after a scheduler returns. By then
# every gateway has tried to connect.
SETTLED_LOSSES = 2
SETTLE_SECONDS = 2 * LAST_BACK_OFF
_NOT_YET = "not reachable yet"
# How the reason of a connection begins that a scheduler refuses until a setting changes.
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED")


class LinkObserver(Protocol):
    """Receives changes of a link and of the generations on it."""

    @property
    def observes_every_message(self) -> bool:
        """Whether `link_changed` is called after every message."""
        ...

    def link_changed(self, link: "Link") -> None:
        """The link's load, models, readiness or reservation changed."""

    def link_lost(self, link: "Link", generations: list[Generation], loss: Loss | None) -> None:
        """The stream broke; `generations` had not ended.

        `loss` is None if the scheduler was draining, or had never answered on this stream.
        """

    def loss_explained(self, link: "Link") -> None:
        """It is now known whether the lost process had ended."""

    def generation_ended(self, link: "Link", generation: Generation, finish: pb.Finish) -> None:
        """The scheduler ended a generation that was not aborted."""


class Link:
    """One scheduler: its latest reports, and the generations open there.

    A scheduler may be reserved: then only one gateway uses it for some seconds, to run a suspect
    without other requests.
    """

    def __init__(
        self,
        target: str,
        observer: LinkObserver,
        metrics: GatewayMetrics,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.target = target
        self.connected = False
        self.draining = False
        self.delisted = False  # its address has left DNS: it gets no new requests
        self.models: dict[str, pb.Model] = {}
        self._metrics_label = ""  # the model, or several, joined by commas
        self.load = pb.Load()
        # Grows when the scheduler gains a worker, or a reservation begins or ends: then it may be
        # able to run generations that it handed back before.
        self.capacity_changes = 0
        # The scheduler's process, and since when it has run without a suspect of another gateway.
        self.instance = ""
        self.free_of_suspects_since = 0.0
        # Grows when a reservation begins and when it ends, so it is odd during one.
        self.reservation_changes = 0
        self.reserved_for_us = False
        # Runs for SETTLE_SECONDS after a lost scheduler has returned.
        self._settling: asyncio.TimerHandle | None = None
        # The latest loss, until the scheduler answers again: its process may not have ended.
        self._unexplained_loss: Loss | None = None
        self._fault = LatestCause()  # why there is no connection
        self._observer = observer
        self._metrics = metrics
        self._connection = Connection(target, self, credentials)
        self._requests_elsewhere = 0  # requests of other gateways, by the latest report
        self._open: dict[int, Generation] = {}  # by stream number
        self._streams: dict[Generation, int] = {}  # the reverse
        self._next_stream = 0

    @property
    def ready(self) -> bool:
        """Whether new requests may be sent."""
        accepts = self.connected and not self.draining and not self.delisted
        return accepts and self.load.ready_workers > 0

    @property
    def reserved(self) -> bool:
        """Whether a gateway has it alone; other gateways may send nothing meanwhile."""
        return self.reservation_changes % 2 == 1

    def serves(self, generation: Generation) -> bool:
        """Whether it can run a generation: it is ready, has the model, and has not refused it.

        A generation that it handed back has to wait until its capacity changes.
        """
        return (
            self.ready
            and generation.model in self.models
            and self.target not in generation.refused_by
            and generation.handed_back_by.get(self.target) != self.capacity_changes
        )

    def answers(self, model: str) -> bool:
        """Whether a call about a model's text may be sent; such calls need no worker."""
        takes_calls = self.connected and not self.draining and not self.reserved
        return takes_calls and model in self.models

    async def call(self, method: str, request: bytes) -> bytes:
        """See `Connection.call`."""
        return await self._connection.call(method, request)

    def accepts(self, generation: Generation) -> bool:
        """Whether a generation may be sent to run there among others.

        After several losses, a generation waits until the other gateways have connected, too.
        Otherwise it could repeatedly end the process before they connect.
        """
        if self._settling is not None and generation.losses >= SETTLED_LOSSES:
            return False
        return not self.reserved and self.serves(generation)

    def has(self, generation: Generation) -> bool:
        """Whether a generation is open here."""
        return generation in self._streams

    @property
    def idle(self) -> bool:
        """Whether no generation is open here."""
        return not self._open

    @property
    def num_open(self) -> int:
        """Generations of this gateway that are open here."""
        return len(self._open)

    @property
    def num_requests(self) -> int:
        """Requests open there: of this gateway, and of others by the scheduler's latest report."""
        return len(self._open) + self._requests_elsewhere

    @property
    def num_workers(self) -> int:
        """Workers ready there."""
        return int(self.load.ready_workers)

    @property
    def pressure(self) -> float:
        """Requests per worker."""
        return self.num_requests / max(1, self.num_workers)

    def generations(self) -> list[Generation]:
        """The open generations that were not aborted."""
        return [generation for generation in self._open.values() if not generation.aborted]

    def start(self) -> None:
        """Begins to connect."""
        self._connection.start()

    async def close(self) -> None:
        """Ends the stream, which aborts its open generations."""
        self._stop_settling()
        await self._connection.close()

    def submit(self, generation: Generation) -> None:
        """Sends a generation, from its beginning or from the end of an earlier attempt."""
        stream = self._unused_stream()
        self._open[stream] = generation
        self._streams[generation] = stream
        self._connection.send(partial(self._submit_message, stream, generation))

    def abort(self, generation: Generation) -> bool:
        """Aborts a generation at the scheduler; False if it is not open here."""
        stream = self._streams.get(generation)
        if stream is None:
            return False
        self._connection.send(partial(self._abort_message, stream))
        return True

    def request_reservation(self) -> None:
        """Asks for exclusive use of the scheduler; `reserved_for_us` shows when it is granted."""
        self._connection.send(lambda: pb.MultiplexRequest(reserve=True))

    def end_reservation(self) -> None:
        """Gives up the reservation, or the request for one."""
        self._connection.send(lambda: pb.MultiplexRequest(reserve=False))

    def assume_ended(self, loss: Loss) -> None:
        """Assumes that the lost process has ended, as it has not answered for some time."""
        if loss.ended is None:
            loss.resolve("")
        if self._unexplained_loss is loss:
            self._observer.loss_explained(self)

    def _unused_stream(self) -> int:
        """A number that no open generation has; a number is in use until its Finish arrives."""
        while True:
            self._next_stream = (self._next_stream + 1) % 2**32
            if self._next_stream not in self._open:
                return self._next_stream

    def _submit_message(self, stream: int, generation: Generation) -> pb.MultiplexRequest | None:
        if generation.aborted:  # before it was sent
            del self._open[stream]
            del self._streams[generation]
            return None
        message = pb.MultiplexRequest()
        message.submit.stream = stream
        message.submit.request = generation.next_attempt()
        message.submit.moved = generation.moved
        message.submit.job = generation.job
        if generation.trace is not None:
            message.submit.traceparent = generation.trace.traceparent
            message.submit.tracestate = generation.trace.tracestate
        if generation.worker_losses is not None:
            losses, num_tokens = generation.worker_losses
            if num_tokens == len(generation.tokens):
                message.submit.worker_losses.CopyFrom(losses)
        return message

    def _abort_message(self, stream: int) -> pb.MultiplexRequest | None:
        return pb.MultiplexRequest(abort=stream) if stream in self._open else None

    def stream_ended(self, reason: str) -> bool:
        """Resets the state of the stream, and returns its generations to the observer."""
        was_connected = self.connected
        loss = Loss(self.instance) if was_connected and not self.draining else None
        if was_connected:
            log.warning("scheduler %s lost: %s", self.target, reason)
            self._fault.reported = _NOT_YET  # the loss has been reported
            self._unexplained_loss = loss
        else:
            self._report_unreached(reason)
        self.connected = self.draining = self.reserved_for_us = False
        self._stop_settling()
        self.load = pb.Load()
        self._requests_elsewhere = 0
        unfinished = self.generations()
        self._open.clear()
        self._streams.clear()
        self._observer.link_lost(self, unfinished, loss)
        self.reservation_changes = 0
        return was_connected

    def _report_unreached(self, reason: str) -> None:
        """Logs why there is no connection, at debug unless the cause changes."""
        problem = tls_problem(reason)
        if problem is None and reason.startswith(_REFUSALS):
            problem = reason
        # A scheduler that cannot be reached may be starting.
        cause = problem or _NOT_YET
        level = self._fault.level(cause, logging.INFO if problem is None else logging.WARNING)
        log.log(level, "scheduler %s: %s", self.target, cause)
        log.debug("scheduler %s not reached: %s", self.target, reason)

    def received(self, response: pb.MultiplexResponse) -> None:
        """Handles one message of the scheduler."""
        if response.draining and not self.draining:
            log.info("scheduler %s drains", self.target)
            self.draining = True
        if response.prompts:
            metrics = self._metrics.of(self._metrics_label)
            for generation, error in deliver_prompts(response, self._open, metrics):
                self._fail(generation, error)
        if response.streams:
            metrics = self._metrics.of(self._metrics_label)
            for delta in deliver(response, self._open, metrics):
                self._handle_misplaced(delta)
        for ended in response.finished:
            self._finish(ended)
        if response.HasField("models"):
            self._note_models(response)
        if response.HasField("load"):
            self._note_load(response)
        changed = response.HasField("models") or response.HasField("load") or response.draining
        reservation = response.reservation_changes, response.reserved
        if reservation != (self.reservation_changes, self.reserved_for_us):
            self._note_reservation(*reservation)
            changed = True
        if changed or self._observer.observes_every_message:
            self._observer.link_changed(self)

    def _note_models(self, response: pb.MultiplexResponse) -> None:
        # A scheduler without a worker so far lists no models. The models it served before stay.
        if response.models.models:
            self.models = {model.id: model for model in response.models.models}
            self._metrics_label = ",".join(sorted(self.models))
            self._metrics.of(self._metrics_label)
        if not self.connected:
            self._note_connected(response.instance_id)
        served = ", ".join(sorted(self.models)) or "no model yet"
        log.info("scheduler %s is connected and serves %s", self.target, served)

    def _note_connected(self, instance: str) -> None:
        self.connected = True
        self.instance = instance
        self.free_of_suspects_since = time.monotonic()
        if self._unexplained_loss is not None:
            loop = asyncio.get_running_loop()
            self._settling = loop.call_later(SETTLE_SECONDS, self._settled)
            self._unexplained_loss.resolve(instance or "unknown")
            self._unexplained_loss = None
            self._observer.loss_explained(self)

    def _settled(self) -> None:
        self._settling = None
        self._observer.link_changed(self)

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    def _note_load(self, response: pb.MultiplexResponse) -> None:
        self.capacity_changes += response.load.ready_workers > self.load.ready_workers
        self.load = response.load
        reported = response.load.waiting + response.load.running
        self._requests_elsewhere = max(0, reported - len(self._open))
        if response.HasField("received"):
            self._connection.check_read(response.received)

    def _note_reservation(self, changes: int, for_us: bool) -> None:
        if changes != self.reservation_changes:
            self.capacity_changes += 1
            if not self.reserved_for_us and changes % 2 == 0:
                # Another gateway has just run a suspect there.
                self.free_of_suspects_since = time.monotonic()
        self.reservation_changes, self.reserved_for_us = changes, for_us

    def _handle_misplaced(self, delta: MisplacedDelta) -> None:
        """Ignores tokens that were received before; fails a generation whose tokens are missing."""
        stream, generation, begin, num_tokens = delta
        end, received = begin + num_tokens, len(generation.tokens)
        log.error(
            "scheduler %s, stream %d: received tokens %d to %d after %d tokens",
            self.target,
            stream,
            begin,
            end,
            received,
            extra=fields(request_id=generation.request_id),
        )
        if end > received and not generation.aborted:
            self._fail(generation, RequestError(Code.INTERNAL, "the scheduler's output has a gap"))

    def _fail(self, generation: Generation, error: RequestError) -> None:
        """Aborts a generation at the scheduler and fails it."""
        generation.aborted = True
        self.abort(generation)
        generation.fail(error)

    def _finish(self, ended: pb.StreamFinish) -> None:
        generation = self._open.pop(ended.stream, None)
        if generation is None:
            log.error("scheduler %s finished unknown stream %d", self.target, ended.stream)
            return
        del self._streams[generation]
        if generation.aborted:
            generation.record_usage(ended.finish)
        else:
            self._observer.generation_ended(self, generation, ended.finish)
