"""All schedulers of a gateway: sends generations to them, and to another one after a loss."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence

from pagewire.addresses import Address, Resolve, resolve
from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.models import Models, ServedModel, find_model
from pagewire.gateway.routing.calls import Calls
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.selection import select
from pagewire.gateway.routing.waiting import WaitingGenerations
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.protocol import MAX_CLIENT_MESSAGE_BYTES
from pagewire.rpc.targets import Targets
from pagewire.suspicion import LOSS_TIMEOUT_SECONDS, Loss
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
# A message above gRPC's limit would end the stream for all its requests. The rest of the limit is
# for the tokens from which a later attempt resumes.
MAX_REQUEST_BYTES = MAX_CLIENT_MESSAGE_BYTES * 3 // 4


class Schedulers:
    """One link to each scheduler, and the generations that wait for one."""

    def __init__(
        self,
        addresses: Sequence[Address],
        metrics: GatewayMetrics,
        resolve_names: Resolve = resolve,
        resume_seconds: float = GatewayConfig.resume_timeout,
        credentials: Credentials = NO_CREDENTIALS,
        max_resumes: int = GatewayConfig.max_resumes,
        expected_models: Collection[str] = (),
    ) -> None:
        """One of `expected_models` without a scheduler is UNAVAILABLE, not unknown."""
        self.links: dict[str, Link] = {}
        self._targets = Targets(addresses, resolve_names, log)
        self._credentials = credentials
        self._metrics = metrics
        self._calls = Calls(self.links, resume_seconds)
        self._waiting = WaitingGenerations(self.links, metrics, resume_seconds, max_resumes)
        self._was_ready = asyncio.Event()
        self._expected_models = tuple(expected_models)
        # The models served when any scheduler last reported one; expected ones stay.
        self._last_models: dict[str, pb.Model] = {}
        self._refresher: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._loss_timers: set[asyncio.TimerHandle] = set()

    @property
    def ready(self) -> bool:
        """Whether some scheduler accepts requests."""
        return any(link.ready for link in self.links.values())

    @property
    def retry_after(self) -> int:
        """Seconds after which to retry, while schedulers refuse new requests for every model.

        0 if a scheduler accepts them, or if a model has no ready scheduler: its requests wait.
        """
        ready = [link for link in self.links.values() if link.ready]
        seconds = _least_retry_after(ready)
        if seconds and self.models().keys() <= {name for link in ready for name in link.models}:
            return seconds
        return 0

    def retry_after_for(self, model: str) -> int:
        """Seconds after which to retry, while all ready schedulers of a model refuse requests."""
        return _least_retry_after(
            link for link in self.links.values() if link.ready and model in link.models
        )

    async def start(self) -> None:
        """Resolves the addresses, begins to connect, and keeps both up to date."""
        await self.refresh()
        self._refresher = asyncio.create_task(self._refresh_forever())

    async def wait_until_ready(self, seconds: float) -> None:
        """Waits until a scheduler has been ready, or the time has passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._was_ready.wait(), seconds)

    async def close(self) -> None:
        """Ends every stream, which aborts all open generations."""
        if self._refresher is not None:
            self._refresher.cancel()
        self._waiting.close()
        for timer in self._loss_timers:
            timer.cancel()
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)

    def models(self) -> dict[str, pb.Model]:
        """The models of all schedulers, including disconnected ones.

        While no scheduler reports a model, these are the models served last. Expected models stay.
        Requests for such models wait.
        """
        known = {name: model for link in self.links.values() for name, model in link.models.items()}
        if known:
            last = self._last_models
            kept = {name: last[name] for name in self._expected_models if name in last}
            self._last_models = kept | known
        return self._last_models

    def served(self) -> Models:
        """The facts of each model for parsing."""
        models = {name: ServedModel.of(model) for name, model in self.models().items()}
        return {**dict.fromkeys(self._expected_models), **models}

    def model(self, name: str | None) -> pb.Model:
        """The model that a request names, or the only one; RequestError if there is none."""
        found, _ = find_model(name, self.served())
        return self.models()[found]

    def submit(self, candidates: Sequence[Generation]) -> None:
        """Sends all candidates of a prompt to one scheduler, where they share the prompt's KV.

        They wait if no scheduler is ready.
        """
        first = candidates[0]
        _check_size(first.common.data)
        link = self._select(first)
        for generation in candidates:
            if link is None:
                self._waiting.add(generation)
            else:
                link.submit(generation)

    async def call(self, method: str, model: str, request: bytes) -> bytes:
        """Calls a method that generates nothing, at any scheduler of the model; see `Calls`."""
        _check_size(request)
        return await self._calls.call(method, model, request)

    def abort(self, generation: Generation) -> None:
        """Stops a generation whose output is no longer needed."""
        generation.aborted = True
        if not self._waiting.remove(generation):
            any(link.abort(generation) for link in self.links.values())

    def fail_all(self, failure: RequestError) -> None:
        """Ends every open generation with an error."""
        submitted = [g for link in self.links.values() for g in link.generations()]
        for generation in [*submitted, *self._waiting]:
            self.abort(generation)
            generation.fail(failure)

    async def refresh(self) -> None:
        """Resolves the addresses, adds links to new targets, and drops idle links to vanished ones.

        A link to a vanished target gets no new requests and is dropped when its last one has ended.
        """
        listed = await self._targets.refresh()
        for target in sorted(listed - self.links.keys()):
            self._add_link(target)
        for target, link in list(self.links.items()):
            link.delisted = target not in listed
            if link.delisted and link.idle:
                self._drop_link(link)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            await self.refresh()

    def _add_link(self, target: str) -> None:
        link = Link(target, self, self._metrics, self._credentials)
        self.links[target] = link
        link.start()

    def _drop_link(self, link: Link) -> None:
        """Closes a link in a new task, because the caller may run in the link's own task."""
        if self.links.pop(link.target, None) is None:
            return
        log.info("scheduler %s is no longer listed", link.target)
        self._waiting.link_dropped(link)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # The links report changes through the following methods (`LinkObserver`).

    @property
    def observes_every_message(self) -> bool:
        """True while there are suspects: then every message is evidence."""
        return self._waiting.suspects_active

    def link_changed(self, link: Link) -> None:
        """Dispatches waiting generations and calls, which may be able to run now."""
        if link.ready:
            self._was_ready.set()
        self._calls.link_changed()
        self._waiting.link_changed(link)

    def link_lost(self, link: Link, generations: list[Generation], loss: Loss | None) -> None:
        """Sends the link's generations to another scheduler, or lets them wait for one."""
        if loss is not None:
            self._assume_ended_later(link, loss)
        self._waiting.link_lost(link, generations, loss)
        if link.delisted:
            self._drop_link(link)

    def loss_explained(self, link: Link) -> None:
        """This may be the last evidence against a suspect, or clear generations of suspicion."""
        self._waiting.loss_explained()

    def generation_ended(self, link: Link, generation: Generation, finish: pb.Finish) -> None:
        """Ends it, unless another scheduler can run what this one could not."""
        if finish.error.code == Code.UNAVAILABLE:
            generation.handed_back_by[link.target] = link.capacity_changes
            generation.record_worker_losses(finish)
            generation.trace_event("handed back", link.target)
            self._waiting.add(generation)
            # Not now: the prompt's other candidates may be handed back in the same message.
            self._waiting.dispatch_soon()
            return
        if finish.error.HasField("retry_after_ms"):
            generation.refused_by.add(link.target)
            other = self._select(generation)
            if other is not None:
                self._waiting.submit_again(generation, other)
                return
        generation.end(finish)
        if generation.finish is not None:
            self._metrics.observe_generation(generation)
        if link.delisted and link.idle:
            self._drop_link(link)

    def _assume_ended_later(self, link: Link, loss: Loss) -> None:
        """Decides about a loss after some time, in case the scheduler does not return."""

        def assume_ended() -> None:
            self._loss_timers.discard(timer)
            link.assume_ended(loss)

        timer = asyncio.get_running_loop().call_later(LOSS_TIMEOUT_SECONDS, assume_ended)
        self._loss_timers.add(timer)

    def _select(self, generation: Generation) -> Link | None:
        return select(self.links.values(), generation)


def _least_retry_after(links: Iterable[Link]) -> int:
    """The seconds until the first of them accepts requests; 0 without links."""
    return min((link.load.retry_after_seconds for link in links), default=0)


def _check_size(request: bytes) -> None:
    if len(request) > MAX_REQUEST_BYTES:
        raise invalid("", f"the request is larger than {MAX_REQUEST_BYTES} bytes; split it")
