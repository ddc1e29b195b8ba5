"""The schedulers a gateway knows: which one takes a request, and what happens when one is lost."""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Iterable, Sequence

from pagewire.addresses import Address, Resolve, resolve
from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.affinity import in_order
from pagewire.gateway.generation.generation import Generation, Mailbox
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.models import model_of
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.trials import Trials
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.protocol import MAX_CLIENT_MESSAGE_BYTES
from pagewire.suspicion import LOSS_TIMEOUT_SECONDS, MAX_CRASHES_ALONE, Loss
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
# A scheduler takes the prompts that belong to it up to so many times its share of all requests.
LARGEST_SHARE = 1.25
# A message above gRPC's limit would end the stream of everybody; resumed tokens need room too.
LARGEST_REQUEST_BYTES = MAX_CLIENT_MESSAGE_BYTES * 3 // 4


class Schedulers:
    """One link to each scheduler, and the generations that wait for a link.

    A generation with which `max_resumes` schedulers were lost in a row, without a token of it in
    between, is a suspect. Suspects go on one at a time, each alone in a scheduler: until its next
    token, or until its scheduler has lived with it for a while. One that was alone in two processes
    that ended fails, if those without it lived in between (`suspicion.py`).
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        metrics: GatewayMetrics,
        resolve_names: Resolve = resolve,
        resume_seconds: float = 30.0,
        credentials: Credentials = NO_CREDENTIALS,
        max_resumes: int = 3,
    ) -> None:
        self._credentials = credentials
        self._max_resumes = max_resumes
        self._trials = Trials(self._leave_queue)
        self._suspects_wait = False
        self.links: dict[str, Link] = {}
        self._addresses = addresses
        self._targets: dict[Address, list[str]] = {}
        self._metrics = metrics
        self._resolve = resolve_names
        self._resume_seconds = resume_seconds
        self._homeless: dict[Generation, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._explanations: set[asyncio.TimerHandle] = set()
        self._refresher: asyncio.Task[None] | None = None
        self._was_ready = asyncio.Event()
        self._settling: asyncio.Handle | None = None
        # What was served when any scheduler last knew of a model.
        self._served: dict[str, pb.Model] = {}

    @property
    def ready(self) -> bool:
        """Whether some scheduler takes requests."""
        return any(link.ready for link in self.links.values())

    @property
    def retry_after(self) -> int:
        """Seconds after which new requests should come back, as every ready scheduler refuses
        them now; 0 if one takes them, or none is ready and they wait for its return."""
        return min(
            (link.load.retry_after_seconds for link in self.links.values() if link.ready),
            default=0,
        )

    async def start(self) -> None:
        """Resolves the addresses, begins to connect, and keeps both up to date."""
        await self.refresh()
        self._refresher = asyncio.create_task(self._refresh_forever())

    async def wait_until_ready(self, seconds: float) -> None:
        """Until some scheduler has been ready, for so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._was_ready.wait(), seconds)

    async def close(self) -> None:
        """Ends every stream, which aborts what is open on them."""
        if self._refresher is not None:
            self._refresher.cancel()
        for timer in self._homeless.values():
            timer.cancel()
        if self._settling is not None:
            self._settling.cancel()
        for timer in self._explanations:
            timer.cancel()
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)

    def models(self) -> dict[str, pb.Model]:
        """The models of all schedulers, those that are away for the moment included.

        While no scheduler knows of one, those that were served last: their requests wait.
        """
        known = {name: model for link in self.links.values() for name, model in link.models.items()}
        if known:
            self._served = known
        return self._served

    def model(self, name: str | None) -> pb.Model:
        """The model that a request names, or the only one; RequestError if there is none."""
        models = self.models()
        return models[model_of(name, models)]

    def submit(self, siblings: Sequence[Generation]) -> None:
        """Sends the choices of one prompt to the least loaded scheduler, where they share its KV.

        They wait for one if none is ready.
        """
        first = siblings[0]
        if len(first.common.data) > LARGEST_REQUEST_BYTES:
            raise invalid("", f"the request is larger than {LARGEST_REQUEST_BYTES} bytes; split it")
        link = self._choose(first)
        for generation in siblings:
            if link is None:
                self._let_wait(generation)
            else:
                link.submit(generation)

    def abort(self, generation: Generation) -> None:
        """Nobody wants the generation any more; its scheduler hears of it at once."""
        generation.closed = True
        timer = self._homeless.pop(generation, None)
        if timer is not None:
            timer.cancel()
            return
        any(link.abort(generation) for link in self.links.values())

    def fail_all(self, failure: RequestError) -> None:
        """Ends every open generation with an error."""
        open_ones = [g for link in self.links.values() for g in link.generations()]
        for generation in [*open_ones, *self._homeless]:
            self.abort(generation)
            generation.fail(failure)

    def link_changed(self, link: Link) -> None:
        """Gives waiting generations another try."""
        self._trials.heard(link)
        if link.ready:
            self._was_ready.set()
            if self._homeless or self._trials.active:
                self._settle()

    def link_lost(self, link: Link, generations: list[Generation], loss: Loss | None) -> None:
        """Moves generations to another scheduler, or lets them wait for one."""
        self._trials.lost(link, generations, loss)
        if loss is not None:
            for generation in generations:
                generation.note_loss(loss)
            if not link.reserved:  # else it may have been for one that was tried there
                for generation in self._homeless:
                    generation.suspicion.discard_trials()
            self._explain_later(link, loss)
        for generation in generations:
            self._let_wait(generation)
        self._settle()
        if link.leaving:
            self._drop(link)

    def link_returned(self, link: Link) -> None:
        """What is known now may prove a suspect guilty, or clear generations of suspicion."""
        for generation in [each for each in self._homeless if each.suspicion.confirmed]:
            self._convict(generation)
        self._settle_soon()

    def _explain_later(self, link: Link, loss: Loss) -> None:
        """In case the scheduler does not return to explain it."""

        def explain() -> None:
            self._explanations.discard(timer)
            link.explain(loss)

        timer = asyncio.get_running_loop().call_later(LOSS_TIMEOUT_SECONDS, explain)
        self._explanations.add(timer)

    def generation_ended(self, link: Link, generation: Generation, finish: pb.Finish) -> None:
        """Passes the end on, unless another scheduler can do what this one could not."""
        if finish.error.code == Code.UNAVAILABLE:
            # With its siblings, which may end in the same message.
            generation.handed_back[link.target] = link.returns
            generation.note_worker_losses(finish)
            self._let_wait(generation)
            self._settle_soon()
            return
        if finish.error.HasField("retry_after_ms"):
            generation.refused_by.add(link.target)
            other = self._choose(generation)
            if other is not None:
                self._move(generation, other)
                return
        generation.end(finish)
        if generation.finish is not None:
            self._metrics.observe_generation(generation)
        if link.leaving and link.idle:
            self._drop(link)

    async def refresh(self) -> None:
        """Resolves the addresses again: adds links to new targets, lets vanished ones leave."""
        for address in self._addresses:
            try:
                self._targets[address] = await self._resolve(address)
            except OSError as error:
                # Those found earlier stay: a name server's hiccup must not end streams.
                log.warning("cannot resolve scheduler address %s: %s", address.text, error)
        wanted = {target for targets in self._targets.values() for target in targets}
        for target in sorted(wanted - self.links.keys()):
            self._add(target)
        for target, link in list(self.links.items()):
            link.leaving = target not in wanted
            if link.leaving and link.idle:
                self._drop(link)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            await self.refresh()

    def _add(self, target: str) -> None:
        link = Link(target, self, self._metrics, self._credentials)
        self.links[target] = link
        link.start()

    def _drop(self, link: Link) -> None:
        """Closes a link in a task of its own: the caller may be the link's own task."""
        if self.links.pop(link.target, None) is None:
            return
        log.info("scheduler %s is no longer listed", link.target)
        self._trials.lost(link, (), None)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _choose(self, generation: Generation) -> Link | None:
        """A ready scheduler that serves the model and takes the generation.

        The first in the order of its prompt's head that is not much busier than all together
        (consistent hashing with bounded loads); the least loaded for a prompt without a head.
        """
        able = {link.target: link for link in self.links.values() if link.takes(generation)}
        if len(able) > 1 and (key := generation.common.head):
            requests = 1 + sum(link.requests for link in able.values())
            workers = sum(link.load.ready_workers for link in able.values())
            for target in in_order(key, list(able)):
                link = able[target]
                share = requests * link.load.ready_workers / workers
                if link.requests < math.ceil(LARGEST_SHARE * share):
                    return link
        return least_loaded(able.values())

    def _let_wait(self, generation: Generation) -> None:
        """Until some scheduler reports that it can take it, or for as long as anyone would wait."""
        generation.moved = True
        generation.refused_by.clear()  # there may be room now
        seconds = max(0.0, min(self._resume_seconds, generation.seconds_left))
        self._homeless[generation] = asyncio.get_running_loop().call_later(
            seconds, self._give_up, generation
        )

    def _settle_soon(self) -> None:
        """Once for all that a message ends."""
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Sends waiting generations, oldest first, wherever one can go; siblings stay together."""
        self._settling = None
        chosen: dict[tuple[Mailbox, int], Link | None] = {}
        suspects = [g for g in self._homeless if g.losses >= self._max_resumes]
        self._suspects_wait = bool(suspects)
        if suspects or self._trials.active:
            self._trials.go_on(suspects, self.links.values())
        for generation in [g for g in self._homeless if g.losses < self._max_resumes]:
            family = (generation.mailbox, generation.prompt)
            if family not in chosen:
                chosen[family] = self._choose(generation)
            link = chosen[family]
            if link is not None and not link.takes(generation):
                link = self._choose(generation)
            if link is not None:
                self._leave_queue(generation, link)

    @property
    def on_trial(self) -> bool:
        """Whether suspects wait or are tried."""
        return self._suspects_wait or self._trials.active

    def _leave_queue(self, generation: Generation, link: Link) -> None:
        generation.waits_again = False
        self._homeless.pop(generation).cancel()
        self._move(generation, link)

    def _convict(self, generation: Generation) -> None:
        """Schedulers that had it alone have ended, and those without it lived."""
        self._homeless.pop(generation).cancel()
        name, losses = generation.request_id, generation.losses
        log.error("request %s was open at %d schedulers that were lost", name, losses)
        generation.fail(
            RequestError(
                Code.INTERNAL,
                f"{losses} schedulers in a row were lost while they had request {name!r}, the last "
                f"{MAX_CRASHES_ALONE} with nothing else to do; it is not resumed again",
            )
        )

    def _move(self, generation: Generation, link: Link) -> None:
        log.info(
            "request %s goes on at %s after %d tokens",
            generation.request.request_id,
            link.target,
            len(generation.tokens),
        )
        self._metrics.resumed.inc()
        link.submit(generation)

    def _give_up(self, generation: Generation) -> None:
        suspect = generation.losses >= self._max_resumes
        its_turn_comes = suspect and self.ready
        # Suspects may take the only scheduler down more than once while it waits.
        once_more = self.on_trial and not generation.waits_again
        if generation.seconds_left > 0 and (its_turn_comes or once_more):
            generation.waits_again = True
            self._let_wait(generation)
            return
        del self._homeless[generation]
        reason = f"no scheduler with a ready worker was there for {self._resume_seconds:g} s; retry"
        code = Code.UNAVAILABLE
        if generation.seconds_left <= 0:
            reason = "no scheduler with a ready worker was there within deadline_ms"
            code = Code.DEADLINE_EXCEEDED
        generation.fail(RequestError(code, reason))


def least_loaded(links: Iterable[Link]) -> Link | None:
    """The link under the least pressure, any of those that are equal; None without links."""
    return min(links, key=lambda link: (link.pressure, random.random()), default=None)
