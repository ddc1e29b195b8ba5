"""How requests end: completed, failed, aborted, or given back to their gateways."""

import asyncio
import logging
from collections.abc import Callable

from pagewire.errors import RequestError
from pagewire.lifecycle.logs import fields
from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.reports.request_log import log_end
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.open_request import Request, error_finish
from pagewire.scheduler.requests.open_requests import OpenRequests
from pagewire.scheduler.workers.ready_workers import ReadyWorkers
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# A lost client may have thousands of requests; each turn of the event loop aborts this many.
ABORTS_PER_TURN = 256


class Endings:
    """Ends requests wherever they are: being parsed, waiting or running."""

    def __init__(
        self, admission: Admission, workers: ReadyWorkers, plan_soon: Callable[[], None]
    ) -> None:
        """`plan_soon` is called after each end, because it may have freed memory."""
        self.open = OpenRequests()
        self._admission = admission
        self._workers = workers
        self._plan_soon = plan_soon

    def abort(self, buffer: DeltaBuffer, stream: int) -> bool:
        """Aborts the request of a client's stream number; False if none is open."""
        return self._abort(self.open.at(buffer, stream))

    def abort_by_id(self, request_id: str, owner: str | None = None) -> bool:
        """Aborts the requests with an id, of one owner or of all; False if none is open."""
        found = [self._abort(request) for request in self.open.named(request_id, owner)]
        return any(found)

    def abort_all(self, buffer: DeltaBuffer) -> None:
        """Aborts every request of a client."""
        self._abort_each(self.open.of(buffer))

    def fail(self, request: Request, failure: RequestError) -> None:
        """Ends an open request with an error."""
        self.stop(request, State.FAILED, error_finish(failure))

    def fail_causes_of_losses(self) -> None:
        """Fails the requests that are known by now to end workers."""
        for sequence in self._admission.remove_deadly():
            request: Request = sequence.owner
            failure = failures.lost_workers(sequence)
            name = request.request_id
            log.error("request %s: %s", name, failure.message, extra=fields(request_id=name))
            self.fail(request, failure)

    def give_back(self, request: Request, failure: RequestError) -> None:
        """Ends a request that cannot run here: its gateway continues it elsewhere.

        The request of a client that is not a gateway fails.
        """
        if not request.buffer.moves:
            self.fail(request, failure)
            return
        name, why = request.request_id, failure.message
        log.info(
            "request %s goes back to its gateway: %s", name, why, extra=fields(request_id=name)
        )
        metrics.HANDED_BACK.inc()
        request.text = None  # the next scheduler sends the text that is held back here
        finish = error_finish(failure)
        _add_worker_losses(finish, request.sequences)
        self.stop(request, State.CANCELLED, finish)

    def give_back_too_large(self, sequence: Sequence) -> None:
        """Gives back a request that none of the remaining workers can run."""
        self.give_back(sequence.owner, failures.remaining_workers_too_small(sequence))

    def give_all_back(self) -> None:
        """Gives every request of a gateway back."""
        for request in self.open.of_gateways():
            self.give_back(request, failures.reserved())

    def give_overdue_back(self) -> None:
        """While no worker is ready, gives back requests that have waited long enough for one."""
        for sequence in self._admission.runnable():
            request: Request = sequence.owner
            seconds = self._workers.outage.longest_wait(request.buffer.moves)
            if request.open and seconds is not None:
                self.give_back(request, failures.no_ready_worker(seconds))

    def stop(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends an open request and frees what its sequences hold."""
        for sequence in request.sequences:
            if not self._admission.remove(sequence):
                self._workers.finish(sequence)
        self.close(request, state, finish)
        self._plan_soon()

    def close(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends a request that has no waiting or running sequence."""
        if request.beams is not None:
            self._workers.forget(request.beams.close())
        self.open.close(request, state, finish)
        if request.trace is not None:
            request.trace.ended(state, finish)
        log_end(request, state, finish)

    def _abort_each(self, requests: list[Request]) -> None:
        for request in requests[:ABORTS_PER_TURN]:
            self._abort(request)
        if rest := requests[ABORTS_PER_TURN:]:
            asyncio.get_running_loop().call_soon(self._abort_each, rest)

    def _abort(self, request: Request | None) -> bool:
        if request is None or not request.open:
            return False
        self.stop(request, State.CANCELLED, pb.Finish(reason=pb.FINISH_REASON_ABORT))
        return True


def _add_worker_losses(finish: pb.Finish, sequences: list[Sequence]) -> None:
    """Reports to the next scheduler how many workers were lost with the request.

    For a beam search, the beam with the most losses counts.
    """
    suspicions = [s.suspicion for s in sequences if s.suspicion and not s.state.final]
    if suspicions:
        worst = max(suspicions, key=lambda suspicion: suspicion.losses)
        finish.worker_losses.workers = worst.losses
        finish.worker_losses.alone.extend(trial.took for trial in worst.crashed_trials)
