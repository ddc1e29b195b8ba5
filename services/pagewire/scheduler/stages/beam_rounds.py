"""Rounds of beam searches: each step ends beams, and the last beam of a round starts the next."""

from collections.abc import Callable
from functools import partial

import numpy as np

from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.beam_request import BeamRequest
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorker, ReadyWorkers


class BeamRounds:
    """Removes the results of beams from a step, and runs the rounds of their searches."""

    def __init__(
        self,
        tokenizer: Tokenizer | TokenIdsOnly,
        workers: ReadyWorkers,
        endings: Endings,
        enqueue: Callable[[list[Sequence]], None],
    ) -> None:
        """`enqueue` queues the sequences of a new round for admission."""
        self._tokenizer = tokenizer
        self._workers = workers
        self._endings = endings
        self._enqueue = enqueue

    def take(
        self,
        worker: ReadyWorker,
        outcome: StepOutcome,
        logprobs: StepLogprobs | None,
    ) -> tuple[StepOutcome, StepLogprobs | None]:
        """Ends the beams in a step; returns the rows of the other requests."""
        requests = worker.streams.owners(outcome.slots)
        plain = np.array([request.beams is None for request in requests], dtype=np.bool_)
        self._end_beams(worker, outcome, requests, logprobs, np.flatnonzero(~plain).tolist())
        return outcome.only(plain), None if logprobs is None else logprobs.of(plain)

    def _end_beams(
        self,
        worker: ReadyWorker,
        outcome: StepOutcome,
        requests: list[Request],
        logprobs: StepLogprobs | None,
        rows: list[int],
    ) -> None:
        at = {} if logprobs is None else {row: i for i, row in enumerate(logprobs.rows.tolist())}
        for row in rows:
            request, slot = requests[row], int(outcome.slots[row])
            if not request.open:
                continue
            # The beams of the next round begin with the kept KV.
            sequence = worker.batch.finish(slot, State.COMPLETED, keep=True)
            assert request.beams is not None
            if logprobs is None or row not in at:
                self._endings.fail(request, failures.no_logprobs())
                continue
            ids, values = logprobs.ids[at[row], 1:], logprobs.values[at[row], 1:]
            if request.beams.answer(sequence, ids, values):
                self._next_round(request, request.beams)

    def _next_round(self, request: Request, beams: BeamRequest) -> None:
        self._workers.forget(beams.next_round())
        if not beams.done:
            self._enqueue(beams.sequences)
            return
        decode = None
        if request.text is not None:
            decode = partial(self._decode, request.skip_special_tokens)
        finish = beams.finish(decode, request.include_stop_token)
        self._endings.close(request, State.COMPLETED, finish)

    def _decode(self, skip_special_tokens: bool, tokens: tuple[int, ...]) -> str:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens)
        return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()
