"""Generations that wait for a scheduler, and their dispatch when a scheduler can run them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from pagewire.errors import Code, RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.isolated_runs import IsolatedRuns
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.selection import select
from pagewire.lifecycle.logs import fields
from pagewire.suspicion import MAX_CRASHES_ALONE, Loss

log = logging.getLogger(__name__)


class WaitingGenerations:
    """Generations without a scheduler, in order of arrival; each has a limit on its wait.

    A generation becomes a suspect when `max_resumes` schedulers in a row were lost with it, without
    a new token in between. Suspects run one at a time, each alone in a scheduler: until the next
    token, or until the scheduler has survived for a while. A suspect fails if two processes ended
    while it was alone in them, and processes without it survived in between (`suspicion.py`).

    Schedulers of one model neither wake nor delay generations of another model.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        metrics: GatewayMetrics,
        max_seconds: float,
        max_resumes: int,
    ) -> None:
        """`links` has the schedulers by target; the caller adds and removes them."""
        self._links = links
        self._metrics = metrics
        self._max_seconds = max_seconds
        self._max_resumes = max_resumes
        self._timers: dict[Generation, asyncio.TimerHandle] = {}
        self._num_waiting: Counter[str] = Counter()  # by model
        self._suspects_waiting = False
        self._isolated_runs = IsolatedRuns(self._resume)
        self._dispatch_scheduled: asyncio.Handle | None = None

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._timers))  # the caller may remove some meanwhile

    @property
    def suspects_active(self) -> bool:
        """Whether suspects wait or run alone. Then any message shows that a scheduler survives."""
        return self._suspects_waiting or self._isolated_runs.active

    def add(self, generation: Generation) -> None:
        """Lets it wait, until its deadline at most. A waiting generation keeps its place."""
        generation.moved = True
        generation.refused_by.clear()  # the schedulers may have room by then
        seconds = max(0.0, min(self._max_seconds, generation.seconds_left))
        self._num_waiting[generation.model] += generation not in self._timers
        self._timers[generation] = asyncio.get_running_loop().call_later(
            seconds, self._timed_out, generation
        )

    def remove(self, generation: Generation) -> bool:
        """Ends its wait; False if it does not wait."""
        timer = self._timers.pop(generation, None)
        if timer is None:
            return False
        timer.cancel()
        self._num_waiting[generation.model] -= 1
        if self._suspects_waiting and self._is_suspect(generation):
            self._suspects_waiting = any(map(self._is_suspect, self._timers))
        return True

    def close(self) -> None:
        """Stops all timers."""
        for timer in self._timers.values():
            timer.cancel()
        if self._dispatch_scheduled is not None:
            self._dispatch_scheduled.cancel()

    def link_changed(self, link: Link) -> None:
        """Dispatches, as the scheduler may be able to run waiting generations now."""
        self._isolated_runs.message_received(link)
        waited_for = any(map(self._num_waiting.__getitem__, link.models))
        if link.ready and (waited_for or self._isolated_runs.concern(link)):
            self.dispatch()

    def link_lost(self, link: Link, generations: list[Generation], loss: Loss | None) -> None:
        """Adds the generations of a lost scheduler, and records the loss."""
        self._isolated_runs.link_lost(link, generations, loss)
        if loss is not None:
            for generation in generations:
                generation.record_loss(loss)
            if not link.reserved:  # otherwise a suspect may have run there alone
                for generation in self:
                    if generation.model in link.models:
                        generation.suspicion.discard_trials()
        for generation in generations:
            generation.trace_event("scheduler lost", link.target)
            self.add(generation)
        self.dispatch()

    def link_dropped(self, link: Link) -> None:
        """The link is no longer used."""
        self._isolated_runs.link_lost(link, (), None)

    def loss_explained(self) -> None:
        """It is now known whether a process had ended: evidence against suspects, or for them."""
        for generation in self:
            if generation.suspicion.confirmed:
                self._fail_suspect(generation)
        self.dispatch_soon()

    def dispatch_soon(self) -> None:
        """Dispatches once, after the present message has been handled."""
        if self._dispatch_scheduled is None:
            self._dispatch_scheduled = asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Sends waiting generations to schedulers, oldest first; candidates stay together."""
        self._dispatch_scheduled = None
        suspects = [generation for generation in self if self._is_suspect(generation)]
        self._suspects_waiting = bool(suspects)
        if self.suspects_active:
            self._isolated_runs.advance(suspects, self._links.values())
        served = {name for link in self._links.values() if link.ready for name in link.models}
        selected: dict[tuple[UpdateQueue[Generation], int], Link | None] = {}
        for generation in self:
            if generation.model not in served or self._is_suspect(generation):
                continue
            prompt = (generation.updates, generation.prompt_index)
            if prompt not in selected:
                selected[prompt] = select(self._links.values(), generation)
            link = selected[prompt]
            if link is not None and not link.accepts(generation):
                link = select(self._links.values(), generation)
            if link is not None:
                self._resume(generation, link)

    def submit_again(self, generation: Generation, link: Link) -> None:
        """Sends a generation that is not waiting to another scheduler."""
        log.info(
            "request %s goes on at %s after %d tokens",
            generation.request_id,
            link.target,
            len(generation.tokens),
            extra=fields(request_id=generation.request_id),
        )
        self._metrics.of(generation.model).resumed.inc()
        generation.trace_event("resumed", link.target)
        link.submit(generation)

    def _is_suspect(self, generation: Generation) -> bool:
        return generation.losses >= self._max_resumes

    def _resume(self, generation: Generation, link: Link) -> None:
        """Ends a generation's wait and sends it to a scheduler."""
        generation.has_waited_twice = False
        self.remove(generation)
        self.submit_again(generation, link)

    def _fail_suspect(self, generation: Generation) -> None:
        """Fails it: schedulers that ran it alone have ended, and schedulers without it survived."""
        self.remove(generation)
        name, losses = generation.request_id, generation.losses
        log.error(
            "request %s failed: %d schedulers were lost with it",
            name,
            losses,
            extra=fields(request_id=name),
        )
        generation.fail(
            RequestError(
                Code.INTERNAL,
                f"{losses} schedulers in a row were lost while they had request {name!r}, the last "
                f"{MAX_CRASHES_ALONE} with nothing else to do; it is not resumed again",
            )
        )

    def _timed_out(self, generation: Generation) -> None:
        """Fails it, or lets it wait again because of suspects."""
        model = generation.model
        some_ready = any(link.ready and model in link.models for link in self._links.values())
        next_suspect = self._is_suspect(generation) and some_ready
        # While suspects run alone, the only scheduler may be lost several times.
        may_wait_twice = self.suspects_active and not generation.has_waited_twice
        if generation.seconds_left > 0 and (next_suspect or may_wait_twice):
            generation.has_waited_twice = True
            self.add(generation)
            return
        self.remove(generation)
        missing = f"no scheduler of {model!r} with a ready worker was there"
        failure = RequestError(Code.UNAVAILABLE, f"{missing} for {self._max_seconds:g} s; retry")
        if generation.seconds_left <= 0:
            given = generation.request.deadline_ms
            failure = RequestError(
                Code.DEADLINE_EXCEEDED,
                f"{missing} within the deadline_ms of {given} ms; give it more time, or retry",
                "deadline_ms",
            )
        generation.fail(failure)
