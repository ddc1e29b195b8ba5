"""Lost workers: their sequences run again, and requests that bring workers down fail."""

import asyncio
import logging
import time
from collections.abc import Callable

from pagewire.lifecycle.logs import fields
from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.workers.ready_workers import ReadyWorker
from pagewire.suspicion import LOSS_TIMEOUT_SECONDS, Loss

log = logging.getLogger(__name__)


class WorkerLosses:
    """The lost workers, from the loss until it is known whether the process has ended."""

    def __init__(
        self, admission: Admission, endings: Endings, plan_soon: Callable[[], None]
    ) -> None:
        """`plan_soon` is called when a loss is explained: held sequences may run then."""
        self._admission = admission
        self._endings = endings
        self._plan_soon = plan_soon
        self._unexplained: dict[str, Loss] = {}  # by the worker's address

    def lost(self, worker: ReadyWorker) -> None:
        """Requeues the sequences of a lost worker, and notes the loss for those in its steps."""
        link, loss = worker.link, None
        if not link.end_explained:
            loss = Loss(worker.info.instance_id, ended=True if link.step_timed_out else None)
        again = self._admission.lose_worker(worker.batch, loss, time.monotonic())
        for sequence in again:
            if sequence.traceparent:
                sequence.owner.trace.lost(link.address)
        if worker.draining and not again:
            log.info("worker %s has drained and is disconnected", link.address)
        elif link.closing and not again:
            log.info("worker %s is disconnected", link.address)
        else:
            metrics.WORKER_LOSSES.inc()
            log.warning(
                "worker %s is lost; %d sequences run again",
                link.address,
                len(again),
                extra=fields(request_ids=[sequence.owner.request_id for sequence in again]),
            )
        if link.step_timed_out:
            self._explained()
        elif loss is not None:
            self._unexplained[link.address] = loss
            asyncio.get_running_loop().call_later(LOSS_TIMEOUT_SECONDS, self._expire, loss)

    def returned(self, address: str, instance_id: str) -> None:
        """A worker is connected: its instance id shows whether its process had ended."""
        loss = self._unexplained.pop(address, None)
        if loss is not None:
            loss.resolve(instance_id)
            self._explained()

    def _expire(self, loss: Loss) -> None:
        """A worker that has not returned by now counts as ended."""
        if loss.ended is None:
            loss.resolve("")
            self._explained()

    def _explained(self) -> None:
        self._endings.fail_causes_of_losses()
        self._plan_soon()
