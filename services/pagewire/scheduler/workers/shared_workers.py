"""Workers that several schedulers share: claims and gives up what `core.sharing` decides."""

import asyncio
import logging
from collections.abc import Callable

from pagewire.scheduler import metrics
from pagewire.scheduler.core.sharing import Sharing, Standing
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# Reports within this many seconds share one plan: many arrive at once when a scheduler joins or
# leaves.
PLAN_SECONDS = 0.05
# The link to a worker that was given up connects again at once. If it has no stream after this many
# seconds, the worker is not reachable.
RETURN_SECONDS = 2.0


class SharedWorkers:
    """This scheduler's part in the sharing of workers (WorkerTurns)."""

    def __init__(
        self,
        name: str,
        model: str,
        settle_seconds: float,
        grace: float,
        load: Callable[[WorkerLink], int],
    ) -> None:
        """`name` is unique; `grace`: seconds for the sequences of a worker that is given up; `load`
        returns how many sequences run on a worker."""
        self.name = name
        self._model = model
        self._grace = grace
        self._load = load
        self._sharing = Sharing(name, settle_seconds)
        # The links with an open stream.
        self._links: dict[str, WorkerLink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """Claims no more workers, and gives up none."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def on_standing(self, link: WorkerLink, standing: pb.Standing) -> None:
        """The worker's holder or a waiting scheduler has changed; ValueError for another model."""
        if standing.model != self._model:
            raise ValueError(
                f"it serves the model {standing.model!r}, this scheduler {self._model!r}"
            )
        self._links[link.address] = link
        if not link.connected and standing.claims == link.claims_sent:
            self._sharing.refused(link.address)
        # A broken stream of this scheduler may still hold it: a claim takes it over.
        broken = standing.holder == self.name and not link.connected
        holder = "" if broken else standing.holder
        waiting = frozenset(standing.waiting)
        self._update(link.address, Standing(holder, waiting if holder else waiting | {self.name}))

    def on_gone(self, link: WorkerLink) -> None:
        """The stream has ended: the worker's standing is unknown, unless it was given up."""
        if self._links.pop(link.address, None) is None:
            return
        if link.released and not link.retired:
            self._update(link.address, Standing("", frozenset({self.name})))
            asyncio.get_running_loop().call_later(RETURN_SECONDS, self._forget, link.address)
        else:
            self._forget(link.address)

    def _forget(self, worker: str) -> None:
        if worker not in self._links:
            self._update(worker, None)

    def _update(self, worker: str, standing: Standing | None) -> None:
        self._sharing.update(worker, standing, asyncio.get_running_loop().time())
        self._plan_in(PLAN_SECONDS)

    def _plan_in(self, seconds: float) -> None:
        """Plans after `seconds`, or earlier if an earlier plan is due already."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if self._closed or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._plan)

    def _plan(self) -> None:
        self._timer = None
        moves = self._sharing.plan(asyncio.get_running_loop().time(), self._load_of)
        for worker in moves.claims:
            link = self._links.get(worker)
            if link is None:  # given up a moment ago
                self._sharing.refused(worker)
                continue
            metrics.WORKER_CLAIMS.inc()
            link.claim()
        for worker in moves.releases:
            link = self._links[worker]
            log.info(
                "worker %s is given up for another scheduler; %d sequences run on it",
                worker,
                self._load(link),
            )
            metrics.WORKER_RELEASES.inc()
            link.release(self._grace)
        if moves.again_in is not None:
            self._plan_in(moves.again_in)

    def _load_of(self, worker: str) -> int:
        link = self._links.get(worker)
        return 0 if link is None else self._load(link)
