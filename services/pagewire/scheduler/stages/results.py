"""Results of a worker's step: tokens to the clients, sequences that end or run again."""

import logging
import time
from collections.abc import Callable

from pagewire.lifecycle.logs import fields
from pagewire.scheduler import metrics
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.stages.beam_rounds import BeamRounds
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorker, ReadyWorkers
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


class Results:
    """Applies the outcome of a step to the requests in its slots."""

    def __init__(
        self,
        max_retries: int,
        tokenizer: Tokenizer | TokenIdsOnly,
        workers: ReadyWorkers,
        endings: Endings,
        enqueue: Callable[[list[Sequence]], None],
    ) -> None:
        """`enqueue` queues sequences for admission."""
        self._max_retries = max_retries
        self._tokenizer = tokenizer
        self._endings = endings
        self._enqueue = enqueue
        self._beam_rounds = BeamRounds(tokenizer, workers, endings, enqueue)

    def deliver(
        self, worker: ReadyWorker, outcome: StepOutcome, logprobs: StepLogprobs | None
    ) -> None:
        """Delivers one token of each row to its client, and ends the sequences that are done."""
        streams = worker.streams
        if logprobs is not None and outcome.valid is not None:
            logprobs = logprobs.of(outcome.valid)
        if self._endings.open.num_searches:
            outcome, logprobs = self._beam_rounds.take(worker, outcome, logprobs)
            if not len(outcome.slots):
                return
        for request in streams.first_tokens(outcome.slots):
            metrics.FIRST_TOKEN_SECONDS.observe(time.monotonic() - request.received)
        streams.trace_first_tokens(outcome.slots)
        candidates = {}
        if logprobs is not None:
            token_bytes = self._tokenizer.token_bytes
            candidates = streams.candidates(outcome.slots, logprobs, token_bytes)
        for row in streams.deliver(outcome, candidates):
            slot = int(outcome.slots[row])
            request = streams.owner(slot)
            worker.batch.finish(slot, State.COMPLETED)
            token = int(outcome.tokens[row])
            finish = request.end_after(token, row in outcome.stopped, row in outcome.ended)
            assert finish is not None
            self._endings.close(request, State.COMPLETED, finish)

    def fail_slot(self, worker: ReadyWorker, error: pb.SlotError) -> None:
        """Requeues the sequence of a slot that failed, or fails its request."""
        if not worker.batch.slots.live[error.slot]:
            return
        request = worker.streams.owner(error.slot)
        sequence = worker.batch.finish(error.slot, State.PENDING, sound=False)
        attempts = sequence.record_failure()
        log.warning(
            "request %s failed on worker %s: %s",
            request.request_id,
            worker.link.address,
            error.message,
            extra=fields(request_id=request.request_id),
        )
        if request.trace is not None and request.beams is None:
            request.trace.failed(worker.link.address, error.message)
        if error.retryable and attempts <= self._max_retries:
            self._enqueue([sequence])
            return
        failure = failures.worker_failed(error.message, error.field)
        if request.beams is not None and failure.field == "logprobs":
            failure.rename_field("beam_search")  # the search asks for them, not the client
        self._endings.fail(request, failure)
