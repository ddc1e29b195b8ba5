"""Suspects are tried one at a time, each alone in a scheduler."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.routing.link import Link
from pagewire.suspicion import Loss

log = logging.getLogger(__name__)

# A scheduler that has lived so long with a suspect, without a token of it yet, stands it.
TRIAL_SECONDS = 5.0
# A scheduler that cannot be had alone in so long has requests of clients without a gateway.
ASK_SECONDS = 20.0


class Trials:
    """The suspect that is tried, and the scheduler that was asked to run nothing else."""

    def __init__(self, submit: Callable[[Generation, Link], None]) -> None:
        """`submit` sends a suspect to a scheduler."""
        self._submit = submit
        self._link: Link | None = None
        self._asked_at = 0.0
        self._granted = False
        self._tried: Generation | None = None
        self._began = 0.0

    @property
    def active(self) -> bool:
        """Whether a scheduler was asked, or runs a suspect."""
        return self._link is not None

    def go_on(self, suspects: Sequence[Generation], links: Iterable[Link]) -> None:
        """Begins what can begin; to be called with those that wait, whenever something changed."""
        now = time.monotonic()
        if self._tried is not None:
            if self._is_tried(self._tried):
                return
            self._tried = None
        if self._link is None:
            self._ask(suspects, links, now)
        elif self._granted:
            self._try_next(suspects, self._link, now)
        elif now - self._asked_at > ASK_SECONDS:
            self._try_in_company(suspects, self._link)

    def heard(self, link: Link) -> None:
        """A message of a scheduler: it lives, and says whether it can still be had alone."""
        if self._link is not link:
            return
        tried = self._tried
        if tried is not None and time.monotonic() - self._began >= TRIAL_SECONDS:
            tried.suspicion.clear()
        if link.alone:
            self._granted = True
        elif self._granted:
            self._end()  # its time is over; who is tried goes on there among others

    def lost(self, link: Link, orphans: Collection[Generation], loss: Loss | None) -> None:
        """A scheduler is gone, by a loss if that was not announced; a suspect that was alone there
        is accused. To be called before the loss is noted."""
        if self._link is not link:
            return
        tried, now = self._tried, time.monotonic()
        if loss is not None and tried in orphans and tried is not None and tried.losses > 0:
            log.warning("request %s was alone when %s was lost", tried.request_id, link.target)
            tried.suspicion.add_trial(loss, now, now - self._began)
        self._end()

    def _is_tried(self, suspect: Generation) -> bool:
        """Whether nothing is known yet: it is there, and nothing has come of it."""
        link = self._link
        return link is not None and link.has(suspect) and not suspect.closed and suspect.losses > 0

    def _ask(self, suspects: Sequence[Generation], links: Iterable[Link], now: float) -> None:
        able = sorted(links, key=lambda link: link.pressure)
        for suspect in suspects:
            for link in able:
                if link.takes(suspect) and suspect.suspicion.may_be_tried(link.lived_since, now):
                    log.info("scheduler %s is asked to run suspects alone", link.target)
                    self._link, self._asked_at = link, now
                    link.ask_for_solitude(True)
                    return

    def _try_next(self, suspects: Sequence[Generation], link: Link, now: float) -> None:
        for suspect in suspects:
            if link.serves(suspect) and suspect.suspicion.may_be_tried(link.lived_since, now):
                self._tried, self._began = suspect, now
                self._submit(suspect, link)
                return
        link.ask_for_solitude(False)
        self._end()

    def _try_in_company(self, suspects: Sequence[Generation], link: Link) -> None:
        """It goes on; whatever becomes of its scheduler is no evidence."""
        link.ask_for_solitude(False)
        self._end()
        suspect = next((suspect for suspect in suspects if link.takes(suspect)), None)
        if suspect is not None:
            self._submit(suspect, link)

    def _end(self) -> None:
        self._link = self._tried = None
        self._granted = False
