"""Runs suspects one at a time, each alone in a scheduler.

A suspect is a generation with which several schedulers in a row were lost. A run alone shows
whether it is the cause (see `pagewire.suspicion`).
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.routing.link import Link
from pagewire.lifecycle.logs import fields
from pagewire.suspicion import Loss

log = logging.getLogger(__name__)

# A scheduler that survives this long with a suspect clears it, even before its first token.
CLEARED_AFTER_SECONDS = 5.0
# A scheduler may never be idle: clients without a gateway may send requests to it. After this time
# without a reservation, a suspect runs there among other requests.
RESERVATION_TIMEOUT_SECONDS = 20.0


class IsolatedRuns:
    """The scheduler with a reservation or a request for one, and the suspect that runs there."""

    def __init__(self, submit: Callable[[Generation, Link], None]) -> None:
        """`submit` sends a waiting suspect to a scheduler."""
        self._submit = submit
        self._link: Link | None = None
        self._requested_at = 0.0
        self._granted = False
        self._running: Generation | None = None
        self._started_at = 0.0

    @property
    def active(self) -> bool:
        """Whether a reservation is requested or held."""
        return self._link is not None

    def concern(self, link: Link) -> bool:
        """Whether a reservation is requested or held at a scheduler with a model of `link`."""
        return self._link is not None and not self._link.models.keys().isdisjoint(link.models)

    def advance(self, suspects: Sequence[Generation], links: Iterable[Link]) -> None:
        """Takes the next step that is possible now; `suspects` are the waiting ones.

        Call it after every change of a link or of the suspects.
        """
        now = time.monotonic()
        if self._running is not None:
            if self._undecided(self._running):
                return
            self._running = None
        if self._link is None:
            self._request_reservation(suspects, links, now)
        elif self._granted:
            self._run_next(suspects, self._link, now)
        elif now - self._requested_at > RESERVATION_TIMEOUT_SECONDS:
            self._run_among_others(suspects, self._link)

    def message_received(self, link: Link) -> None:
        """A message shows that a scheduler lives, and whether it is still reserved."""
        if self._link is not link:
            return
        running = self._running
        if running is not None and time.monotonic() - self._started_at >= CLEARED_AFTER_SECONDS:
            running.suspicion.clear()
        if link.reserved_for_us:
            self._granted = True
        elif self._granted:
            self._reset()  # the reservation has expired; the suspect continues among others

    def link_lost(self, link: Link, generations: Collection[Generation], loss: Loss | None) -> None:
        """Records a lost scheduler: evidence against a suspect that ran there alone.

        No evidence if `loss` is None. Call it before the generations record the loss.
        """
        if self._link is not link:
            return
        running, now = self._running, time.monotonic()
        ran_there = running is not None and running in generations and running.losses > 0
        if loss is not None and running is not None and ran_there:
            log.warning(
                "request %s was alone when %s was lost",
                running.request_id,
                link.target,
                extra=fields(request_id=running.request_id),
            )
            running.suspicion.add_trial(loss, now, now - self._started_at)
        self._reset()

    def _undecided(self, suspect: Generation) -> bool:
        """Whether the suspect still runs, has produced no token, and was not cleared."""
        link = self._link
        return link is not None and link.has(suspect) and not suspect.aborted and suspect.losses > 0

    def _request_reservation(
        self, suspects: Sequence[Generation], links: Iterable[Link], now: float
    ) -> None:
        by_pressure = sorted(links, key=lambda link: link.pressure)
        for suspect in suspects:
            for link in by_pressure:
                if link.accepts(suspect) and _may_run(suspect, link, now):
                    log.info("scheduler %s is asked to run suspects alone", link.target)
                    self._link, self._requested_at = link, now
                    link.request_reservation()
                    return

    def _run_next(self, suspects: Sequence[Generation], link: Link, now: float) -> None:
        for suspect in suspects:
            if link.serves(suspect) and _may_run(suspect, link, now):
                self._running, self._started_at = suspect, now
                self._submit(suspect, link)
                return
        link.end_reservation()
        self._reset()

    def _run_among_others(self, suspects: Sequence[Generation], link: Link) -> None:
        """Gives up the reservation. A loss of its scheduler is then no evidence."""
        link.end_reservation()
        self._reset()
        suspect = next((suspect for suspect in suspects if link.accepts(suspect)), None)
        if suspect is not None:
            self._submit(suspect, link)

    def _reset(self) -> None:
        self._link = self._running = None
        self._granted = False


def _may_run(suspect: Generation, link: Link, now: float) -> bool:
    """Whether a run of the suspect alone there would be evidence."""
    return suspect.suspicion.may_be_tried(link.free_of_suspects_since, now)
