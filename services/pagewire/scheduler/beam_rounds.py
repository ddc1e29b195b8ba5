"""Beam searches among the plain requests of a step: their beams end, and the next round begins."""

from typing import Protocol

import numpy as np

from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.beam_search import BeamSearch
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.beam_request import BeamRequest, beam_params
from pagewire.scheduler.requests.open_request import Request, error_finish
from pagewire.scheduler.requests.parsing import ParsedRequest
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorker
from pagewire.v1 import inference_pb2 as pb


class Runner(Protocol):
    """What a search asks of the engine."""

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Lets sequences wait for admission."""
        ...

    def forget(self, sequences: list[Sequence]) -> None:
        """Workers need not keep the KV of these ended sequences any longer."""
        ...

    def close(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends a request of which nothing waits or runs."""
        ...

    def stop(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends an open request wherever it is."""
        ...


class BeamRounds:
    """The searches of one engine."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | TokenIdsOnly) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def begin(self, request: Request, parsed: ParsedRequest, vocab_size: int) -> None:
        """Starts the search that a request asks for."""
        asked, origin = parsed.beam_search, request.sequence
        assert asked is not None
        assert origin is not None
        search = BeamSearch(
            beam_params(asked), parsed.max_tokens, parsed.sampling.min_tokens, parsed.stop_ids
        )
        request.beams = BeamRequest(search, origin, asked.num_returned or asked.width, vocab_size)
        self._open += 1
        self._runner.enqueue(request.beams.sequences)

    def end(self, beams: BeamRequest) -> None:
        """The search is over, well or badly."""
        self._open -= 1
        self._runner.forget(beams.close())

    def take(
        self,
        worker: ReadyWorker,
        outcome: StepOutcome,
        logprobs: StepLogprobs | None,
    ) -> tuple[StepOutcome, StepLogprobs | None]:
        """Ends the beams in a step, and the rounds that they were the last of; what is left of
        the step are the plain requests."""
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
            sequence = worker.batch.finish(slot, State.COMPLETED, keep=True)
            assert request.beams is not None
            if logprobs is None or row not in at:
                finish = error_finish(failures.no_log_probabilities())
                self._runner.stop(request, State.FAILED, finish)
                continue
            ids, values = logprobs.ids[at[row], 1:], logprobs.values[at[row], 1:]
            if request.beams.answer(sequence, ids, values):
                self._next_round(request, request.beams)

    def _next_round(self, request: Request, beams: BeamRequest) -> None:
        self._runner.forget(beams.next_round())
        if not beams.done:
            self._runner.enqueue(beams.sequences)
            return
        decode = self._decode if request.text is not None else None
        finish = beams.finish(decode, request.include_stop_token)
        self._runner.close(request, State.COMPLETED, finish)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()
