"""All schedulers of a gateway: sends generations to them, and elsewhere when one is lost."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from pagewire.addresses import Address, Resolve, resolve
from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.models import find_model
from pagewire.gateway.routing.isolated_runs import IsolatedRuns
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.selection import select
from pagewire.gateway.routing.waiting import WaitingGenerations
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.transport import LARGEST_REQUEST_BYTES as LARGEST_MESSAGE_BYTES
from pagewire.suspicion import ENDS_ALONE, EXPLAINED_SECONDS, Loss
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
# A message above gRPC's limit would end the stream for all its requests. The rest is for the tokens
# that a later attempt resumes from.
MAX_REQUEST_BYTES = LARGEST_MESSAGE_BYTES * 3 // 4


class Schedulers:
    """One link to each scheduler, and the generations that wait for one.

    A generation becomes a suspect when `max_resumes` schedulers in a row were lost with it, without
    a token of it in between. Suspects run one at a time, each alone in a scheduler: until the next
    token, or until the scheduler has survived it for a while. A suspect fails if two processes
    ended while it was alone in them, and processes without it lived in between (`suspicion.py`).
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        metrics: GatewayMetrics,
        resolve_names: Resolve = resolve,
        resume_seconds: float = GatewayConfig.resume_timeout,
        credentials: Credentials = NO_CREDENTIALS,
        max_resumes: int = GatewayConfig.max_resumes,
    ) -> None:
        self.links: dict[str, Link] = {}
        self._addresses = addresses
        self._resolve = resolve_names
        self._targets: dict[Address, list[str]] = {}
        self._credentials = credentials
        self._metrics = metrics
        self._resume_seconds = resume_seconds
        self._max_resumes = max_resumes
        self._waiting = WaitingGenerations(resume_seconds, self._timed_out)
        self._suspects_waiting = False
        self._isolated_runs = IsolatedRuns(self._resume)
        self._was_ready = asyncio.Event()
        # The models served when any scheduler last reported one.
        self._last_models: dict[str, pb.Model] = {}
        self._refresher: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._loss_timers: set[asyncio.TimerHandle] = set()
        self._dispatch_scheduled: asyncio.Handle | None = None

    @property
    def ready(self) -> bool:
        """Whether some scheduler accepts requests."""
        return any(link.ready for link in self.links.values())

    @property
    def retry_after(self) -> int:
        """Seconds after which to retry, while every ready scheduler refuses new requests.

        0 if one accepts them. 0 too if none is ready, as requests then wait for its return.
        """
        return min(
            (link.load.retry_after_seconds for link in self.links.values() if link.ready),
            default=0,
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
        """Ends every stream, which aborts what is open on them."""
        if self._refresher is not None:
            self._refresher.cancel()
        self._waiting.close()
        if self._dispatch_scheduled is not None:
            self._dispatch_scheduled.cancel()
        for timer in self._loss_timers:
            timer.cancel()
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)

    def models(self) -> dict[str, pb.Model]:
        """The models of all schedulers, those included that are disconnected now.

        While no scheduler reports a model, those served last: their requests wait.
        """
        known = {name: model for link in self.links.values() for name, model in link.models.items()}
        if known:
            self._last_models = known
        return self._last_models

    def model(self, name: str | None) -> pb.Model:
        """The model that a request names, or the only one; RequestError if there is none."""
        models = self.models()
        return models[find_model(name, models)]

    def submit(self, candidates: Sequence[Generation]) -> None:
        """Sends all candidates of a prompt to one scheduler, where they share the prompt's KV.

        They wait if no scheduler is ready.
        """
        first = candidates[0]
        if len(first.common.data) > MAX_REQUEST_BYTES:
            raise invalid("", f"the request is larger than {MAX_REQUEST_BYTES} bytes; split it")
        link = self._select(first)
        for generation in candidates:
            if link is None:
                self._let_wait(generation)
            else:
                link.submit(generation)

    def abort(self, generation: Generation) -> None:
        """Stops a generation whose output is not needed any more."""
        generation.aborted = True
        if not self._stop_waiting(generation):
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
        for address in self._addresses:
            try:
                self._targets[address] = await self._resolve(address)
            except OSError as error:
                # The targets found earlier stay: a failing name server must not end streams.
                log.warning("cannot resolve scheduler address %s: %s", address.text, error)
        listed = {target for targets in self._targets.values() for target in targets}
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
        self._isolated_runs.link_lost(link, (), None)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # The links report changes through the following methods (`LinkObserver`).

    @property
    def observes_every_message(self) -> bool:
        """Any message of a scheduler shows that it survives a suspect."""
        return self._suspects_waiting or self._isolated_runs.active

    def link_changed(self, link: Link) -> None:
        """Waiting generations may be able to run now."""
        self._isolated_runs.message_received(link)
        if link.ready:
            self._was_ready.set()
            if self._waiting or self._isolated_runs.active:
                self._dispatch()

    def link_lost(self, link: Link, generations: list[Generation], loss: Loss | None) -> None:
        """Its generations go to another scheduler, or wait for one."""
        self._isolated_runs.link_lost(link, generations, loss)
        if loss is not None:
            for generation in generations:
                generation.record_loss(loss)
            if not link.reserved:  # else a suspect may have run there alone
                for generation in self._waiting:
                    generation.suspicion.lost_without()
            self._assume_ended_later(link, loss)
        for generation in generations:
            self._let_wait(generation)
        self._dispatch()
        if link.delisted:
            self._drop_link(link)

    def loss_explained(self, link: Link) -> None:
        """This may be the last evidence against a suspect, or clear generations of suspicion."""
        for generation in self._waiting:
            if generation.suspicion.guilty:
                self._fail_suspect(generation)
        self._dispatch_soon()

    def generation_ended(self, link: Link, generation: Generation, finish: pb.Finish) -> None:
        """Ends it, unless another scheduler can run what this one could not."""
        if finish.error.code == Code.UNAVAILABLE:
            generation.handed_back_by[link.target] = link.capacity_changes
            generation.record_worker_losses(finish)
            self._let_wait(generation)
            # Later, as the prompt's other candidates may be handed back in the same message.
            self._dispatch_soon()
            return
        if finish.error.HasField("retry_after_ms"):
            generation.refused_by.add(link.target)
            other = self._select(generation)
            if other is not None:
                self._submit_again(generation, other)
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

        timer = asyncio.get_running_loop().call_later(EXPLAINED_SECONDS, assume_ended)
        self._loss_timers.add(timer)

    def _select(self, generation: Generation) -> Link | None:
        return select(self.links.values(), generation)

    def _is_suspect(self, generation: Generation) -> bool:
        return generation.losses >= self._max_resumes

    def _let_wait(self, generation: Generation) -> None:
        generation.moved = True
        generation.refused_by.clear()  # the schedulers may have room by then
        self._waiting.add(generation)

    def _stop_waiting(self, generation: Generation) -> bool:
        """Removes it from those that wait; False if it does not wait."""
        was_waiting = self._waiting.remove(generation)
        if was_waiting and self._suspects_waiting and self._is_suspect(generation):
            self._suspects_waiting = any(map(self._is_suspect, self._waiting))
        return was_waiting

    def _dispatch_soon(self) -> None:
        """Dispatches once, after the present message has been handled."""
        if self._dispatch_scheduled is None:
            self._dispatch_scheduled = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Sends waiting generations to schedulers, oldest first; candidates stay together."""
        self._dispatch_scheduled = None
        suspects = [g for g in self._waiting if self._is_suspect(g)]
        self._suspects_waiting = bool(suspects)
        if suspects or self._isolated_runs.active:
            self._isolated_runs.advance(suspects, self.links.values())
        selected: dict[tuple[UpdateQueue[Generation], int], Link | None] = {}
        for generation in self._waiting:
            if self._is_suspect(generation):
                continue
            prompt = (generation.updates, generation.prompt_index)
            if prompt not in selected:
                selected[prompt] = self._select(generation)
            link = selected[prompt]
            if link is not None and not link.accepts(generation):
                link = self._select(generation)
            if link is not None:
                self._resume(generation, link)

    def _resume(self, generation: Generation, link: Link) -> None:
        """Ends a generation's wait at a scheduler."""
        generation.has_waited_twice = False
        self._waiting.remove(generation)
        self._submit_again(generation, link)

    def _submit_again(self, generation: Generation, link: Link) -> None:
        log.info(
            "request %s goes on at %s after %d tokens",
            generation.request_id,
            link.target,
            len(generation.tokens),
        )
        self._metrics.resumed.inc()
        link.submit(generation)

    def _fail_suspect(self, generation: Generation) -> None:
        """Schedulers that had it alone have ended, and those without it lived."""
        self._stop_waiting(generation)
        name, losses = generation.request_id, generation.losses
        log.error("request %s failed: %d schedulers were lost with it", name, losses)
        generation.fail(
            RequestError(
                Code.INTERNAL,
                f"{losses} schedulers in a row were lost while they had request {name!r}, the last "
                f"{ENDS_ALONE} with nothing else to do; it is not resumed again",
            )
        )

    def _timed_out(self, generation: Generation) -> None:
        """Fails it, or lets it wait again because of suspects."""
        next_suspect = self._is_suspect(generation) and self.ready
        # While suspects run alone, the only scheduler may be lost several times.
        may_wait_twice = self.observes_every_message and not generation.has_waited_twice
        if generation.seconds_left > 0 and (next_suspect or may_wait_twice):
            generation.has_waited_twice = True
            self._let_wait(generation)
            return
        self._stop_waiting(generation)
        reason = f"no scheduler with a ready worker was there for {self._resume_seconds:g} s; retry"
        code = Code.UNAVAILABLE
        if generation.seconds_left <= 0:
            reason = "no scheduler with a ready worker was there within deadline_ms"
            code = Code.DEADLINE_EXCEEDED
        generation.fail(RequestError(code, reason))
