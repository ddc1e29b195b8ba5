"""The control loop: requests in, steps out to the workers, deltas back to the clients.

Everything here runs on one event loop and only in answer to an event: an arrival, an abort, a
worker's answer, a worker gained or lost. Nothing polls.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError, invalid
from pagewire.packing import unpack
from pagewire.process import end_process
from pagewire.scheduler import metrics
from pagewire.scheduler.beam_request import BeamRequest, beam_params, reserved_arrivals
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batch import StepOutcome, WorkerBatch, WorkerLimits
from pagewire.scheduler.core.beam import BeamSearch
from pagewire.scheduler.core.block_pool import BlockPool
from pagewire.scheduler.core.chunk_size import ChunkSize
from pagewire.scheduler.core.routing import ROUTERS
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.delivery import DeltaBuffer
from pagewire.scheduler.logprobs import StepLogprobs
from pagewire.scheduler.open_request import Request, encode_logprobs, error_finish
from pagewire.scheduler.policies import make_policy
from pagewire.scheduler.requests import (
    ModelLimits,
    ParsedRequest,
    check_model,
    check_request_id,
    parse_request,
)
from pagewire.scheduler.slot_streams import SlotStreams
from pagewire.scheduler.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.worker_link import WorkerLink, encode_step
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb

log = logging.getLogger(__name__)

# A round trip to a worker takes about 1 ms, measured on an H200 machine: with two steps in
# flight the device would wait for steps that are shorter than that.
SHORT_STEP_SECONDS = 0.002
SHORT_STEP_RUN_AHEAD = 4
# What a request without a deadline counts as in the order of the policy `deadline`.
USUAL_DEADLINE_MS = 60_000
# So many times longer than in a queue that stands may the wait seem to be in one that has just
# begun: it may be a burst, which workers take in faster than the rate of a long queue says.
BURST = 4


@dataclass(slots=True, eq=False)
class ReadyWorker:
    """A connected worker and what runs on it."""

    link: WorkerLink
    info: worker_pb.WorkerInfo
    batch: WorkerBatch
    streams: SlotStreams
    step_seconds: float = 1.0
    # It gets no more sequences; it is left once it has none.
    draining: bool = False
    left: bool = False
    # Without a target chunks are as large as a step allows.
    chunks: ChunkSize | None = None


class Engine:
    """The scheduler of one model."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: str,
        tokenizer: Tokenizer | TokenIdsOnly,
        on_readiness: Callable[[], None],
        on_fatal: Callable[[BaseException], object] = end_process,
    ) -> None:
        """`on_readiness` is called when a worker was gained or lost, `on_fatal` when the engine
        itself has failed."""
        self._on_fatal = on_fatal
        self.model = model
        self.tokenizer = tokenizer
        self.draining = False
        # Set while no request is open.
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self.created = int(time.time())
        self._config = config
        self._on_readiness = on_readiness
        self._policy = make_policy(config.policy)
        self._admission = Admission(self._policy, ROUTERS[config.routing]())
        self._waiting = self._admission.waiting
        self._workers: dict[WorkerLink, ReadyWorker] = {}
        self._worker_of: dict[WorkerBatch, ReadyWorker] = {}
        self._limits: ModelLimits | None = None
        self._open: dict[tuple[int, int], Request] = {}
        self._by_id: dict[str, Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Tokenization is CPU work of another language that releases the interpreter's lock.
        self._parser = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._arrivals = 0
        self._parsing = 0
        self._drain_rate = DrainRate(time.monotonic())
        # Since when requests wait, all that could be having been admitted; None if there are none,
        # or no worker for them: how long that takes tells nothing about the queue.
        self._full_since: float | None = None
        self._searches = 0
        self._pump_scheduled = False
        self._publish()

    # What clients ask for

    def submit(
        self, message: pb.GenerateRequest, buffer: DeltaBuffer, stream: int, moved: bool = False
    ) -> None:
        """Takes a request; its deltas and its end go to `buffer` under the number `stream`.

        `moved` is whether it has run or waited elsewhere before.
        """
        self._arrivals += 1
        request_id = message.request_id or f"request-{self._arrivals}"
        moved = moved or bool(message.resume_token_ids)
        request = Request(request_id, buffer, stream, time.monotonic(), self._arrivals, moved)
        self._arrivals += reserved_arrivals(message.beam_search.width)
        refusal = self._refusal(message, request)
        if refusal is not None:
            metrics.REQUESTS.labels(State.FAILED.name.lower()).inc()
            buffer.add_finish(stream, error_finish(refusal), 0)
            return
        self._open[id(buffer), stream] = request
        self.all_closed.clear()
        self._by_id[request_id] = request
        loop = asyncio.get_running_loop()
        if message.deadline_ms:
            seconds = message.deadline_ms / 1000
            request.deadline = loop.call_later(seconds, self._expire, request, message.deadline_ms)
        self._parsing += 1
        task = loop.create_task(self._parse_and_queue(message, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, buffer: DeltaBuffer, stream: int) -> bool:
        """Ends a request by its place; whether it was open."""
        return self._abort(self._open.get((id(buffer), stream)))

    def abort_by_id(self, request_id: str) -> bool:
        """Ends a request by its id; whether it was open."""
        return self._abort(self._by_id.get(request_id))

    def abort_all(self, buffer: DeltaBuffer) -> None:
        """Ends every request of a client that has gone."""
        for request in [r for r in self._open.values() if r.buffer is buffer]:
            self._abort(request)

    def limits(self) -> ModelLimits:
        """What the workers can take; UNAVAILABLE before the first of them is ready.

        While all are lost it is what they could take, so that requests wait for their return.
        """
        if self._workers:
            infos = [worker.info for worker in self._workers.values()]
            self._limits = ModelLimits(
                max_model_len=max(info.max_model_len for info in infos),
                max_pool_tokens=max((info.num_blocks - 1) * info.block_size for info in infos),
                vocab_size=max(info.vocab_size for info in infos),
            )
        if self._limits is None:
            raise RequestError(Code.UNAVAILABLE, "no worker is ready yet; try again later")
        return self._limits

    def models(self) -> pb.ListModelsResponse:
        """The model, once a worker has been ready to serve it."""
        if self._limits is None:
            return pb.ListModelsResponse()
        limits = self.limits()
        model = pb.Model(
            id=self.model,
            created=self.created,
            max_model_len=limits.max_tokens,
            vocab_size=limits.vocab_size,
            has_chat_template=self.tokenizer.chat_template is not None,
        )
        return pb.ListModelsResponse(models=[model])

    def load(self) -> pb.Load:
        """How busy this scheduler is."""
        batches = [worker.batch for worker in self._workers.values()]
        full = self._queue_full(moved=False, tokens=1)
        return pb.Load(
            waiting=len(self._waiting),
            running=sum(batch.num_running for batch in batches),
            used_blocks=sum(batch.pool.used for batch in batches),
            total_blocks=sum(batch.pool.total for batch in batches),
            ready_workers=len(self._admission.workers),
            preemptions=self._admission.preemptions,
            waiting_tokens=self._waiting.tokens,
            retry_after_seconds=math.ceil(full.retry_after or 0) if full else 0,
        )

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        return bool(self._admission.workers)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # What workers say (WorkerEvents)

    def on_ready(self, link: WorkerLink, info: worker_pb.WorkerInfo) -> None:
        """See WorkerEvents."""
        if info.model != self.model:
            raise ValueError(f"it serves the model {info.model!r}, this scheduler {self.model!r}")
        limits = _worker_limits(self._config, info)
        batch = self._admission.add_worker(limits)
        worker = ReadyWorker(
            link, info, batch, SlotStreams(limits.num_slots, self.tokenizer.token_texts)
        )
        if self._config.tpot_slo_ms is not None:
            worker.chunks = ChunkSize(int(self._config.tpot_slo_ms * 1000))
            batch.chunk_tokens = worker.chunks.tokens
        self._workers[link] = self._worker_of[batch] = worker
        self.limits()
        log.info(
            "worker %s is ready: %s %s on %s, %d blocks of %d tokens, %d sequences",
            link.address,
            info.model,
            info.dtype,
            info.device,
            limits.num_blocks - 1,
            limits.block_size,
            limits.num_slots,
        )
        self._on_readiness()
        self._pump_soon()

    def on_draining(self, link: WorkerLink) -> None:
        """See WorkerEvents."""
        worker = self._workers.get(link)
        if worker is None or worker.draining:
            return
        worker.draining = True
        self._admission.drain_worker(worker.batch)
        self._on_readiness()
        self._pump_soon()

    def on_lost(self, link: WorkerLink) -> None:
        """See WorkerEvents."""
        worker = self._workers.pop(link, None)
        if worker is None:
            return
        del self._worker_of[worker.batch]
        loss = self._admission.lose_worker(worker.batch, max(1, self._config.max_retry_attempts))
        if worker.draining and not loss.again and not loss.guilty:
            log.info("worker %s has drained and is left", link.address)
        else:
            metrics.WORKER_LOSSES.inc()
            log.warning("worker %s is lost; %d sequences run again", link.address, len(loss.again))
        for sequence in loss.guilty:
            self._fail_guilty(sequence)
        self._on_readiness()
        self._pump_soon()

    def on_result(self, link: WorkerLink, result: worker_pb.StepResult) -> None:
        """See WorkerEvents."""
        worker = self._workers[link]
        logprobs = StepLogprobs.read(result)
        self._adapt_chunks(worker, result.duration_us)
        for error in result.errors:
            worker.batch.distrust(error.slot)
        outcome = worker.batch.commit(result.step, unpack(result.token_ids))
        metrics.STEPS.inc()
        worker.step_seconds = result.duration_us / 1e6
        metrics.STEP_SECONDS.observe(worker.step_seconds)
        for error in result.errors:
            self._on_slot_error(worker, error)
        if len(outcome.slots):
            metrics.OUTPUT_TOKENS.inc(len(outcome.slots))
            self._deliver(worker, outcome, logprobs)
        if self._config.check_invariants:
            worker.batch.check()
        self._pump_soon()

    def _adapt_chunks(self, worker: ReadyWorker, duration_us: int) -> None:
        """Learns from the oldest step in flight, which took so long."""
        if worker.chunks is None or not worker.batch.in_flight:
            return
        plan = worker.batch.in_flight[0]
        if len(plan.decode_slots):
            worker.chunks.observe(sum(plan.prefill_counts), duration_us)
            worker.batch.chunk_tokens = worker.chunks.tokens

    # Arrival

    def _refusal(self, message: pb.GenerateRequest, request: Request) -> RequestError | None:
        if self.draining:
            return RequestError(Code.UNAVAILABLE, "this scheduler is draining; use another one")
        if (id(request.buffer), request.stream) in self._open:
            return RequestError(
                Code.INVALID_ARGUMENT, f"stream {request.stream} is in use; choose a free number"
            )
        if request.request_id in self._by_id:
            return RequestError(
                Code.INVALID_ARGUMENT,
                f"request_id {request.request_id!r} is running already; choose another",
                "request_id",
            )
        return self._queue_full(request.moved, tokens=0)

    def _queue_full(self, moved: bool, tokens: int) -> RequestError | None:
        """Why a request of so many tokens cannot be queued now.

        One that has run or waited elsewhere may find room where new ones do not: it was taken
        once, and its client may have seen the beginning.
        """
        requests = len(self._waiting) + self._parsing
        now = time.monotonic()
        if self._full_since is None:
            self._drain_rate.rest(now)
        expected = self._drain_rate.seconds_for(requests, now)
        longest = self._config.max_waiting_seconds
        stands = self._full_since is not None and now - self._full_since > longest / 2
        bound = longest if stands else BURST * longest
        factor = 2 if moved else 1
        if requests >= factor * self._config.max_waiting_requests:
            reason = f"{requests} requests are waiting already"
        elif (
            len(self._waiting)
            and self._waiting.tokens + tokens > factor * self._config.max_waiting_tokens
        ):
            reason = f"requests of {self._waiting.tokens} tokens are waiting already"
        elif self._full_since is not None and not moved and expected > bound:
            reason = f"requests wait for about {expected:.1f} s already"
        else:
            return None
        seconds = self._drain_rate.retry_after(requests, now)
        return RequestError(
            Code.RESOURCE_EXHAUSTED,
            f"{reason}; try again in {math.ceil(seconds)} s",
            retry_after=seconds,
        )

    async def _parse_and_queue(self, message: pb.GenerateRequest, request: Request) -> None:
        try:
            parsed = await self._parse(message)
        except RequestError as error:
            if request.open:
                self._close(request, State.FAILED, error_finish(error))
            return
        finally:
            self._parsing -= 1
        try:
            if request.open:
                self._queue(request, parsed)
        except Exception:
            log.exception("request %s could not be queued", request.request_id)
            unqueued = RequestError(
                Code.INTERNAL, "the request could not be queued; the scheduler's log says why"
            )
            self._close(request, State.FAILED, error_finish(unqueued))

    async def _parse(self, message: pb.GenerateRequest) -> ParsedRequest:
        check_request_id(message.request_id)
        check_model(message.model, self.model)
        if message.priority and not self._policy.uses_priority:
            raise invalid(
                "priority",
                f"priority is {message.priority}, but this server admits by "
                f"{self._config.policy}; leave it out or start with --policy priority",
            )
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._parser, parse_request, message, self.tokenizer, self.limits()
            )
        except RequestError:
            raise
        except Exception as error:
            log.exception("a request could not be parsed")
            raise RequestError(
                Code.INTERNAL, "the request could not be parsed; the scheduler's log says why"
            ) from error

    def _queue(self, request: Request, parsed: ParsedRequest) -> None:
        sequence = Sequence(
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            max_tokens=parsed.max_tokens,
            stop_ids=parsed.stop_ids,
            arrival=request.arrival,
            priority=parsed.priority,
            cache_salt=parsed.cache_salt,
            tenant=parsed.tenant,
            deadline=_deadline(request, parsed.deadline_ms),
            owner=request,
        )
        sequence.output.extend(parsed.resumed)
        request.sequence = sequence
        request.text = parsed.text
        request.include_stop_token = parsed.include_stop_token
        request.unreported_prompt = len(parsed.prompt)
        if parsed.beam_search is not None:
            self._search(request, parsed)
            return
        ended = self._replay(request, parsed)
        if ended is not None:
            self._close(request, State.COMPLETED, ended)
            return
        full = self._queue_full(request.moved, sequence.num_known)
        if full is not None:
            self._close(request, State.FAILED, error_finish(full))
            return
        self._waiting.push(sequence)
        self._pump_soon()

    def _search(self, request: Request, parsed: ParsedRequest) -> None:
        """Begins a beam search."""
        asked, origin = parsed.beam_search, request.sequence
        assert asked is not None
        assert origin is not None
        search = BeamSearch(
            beam_params(asked), parsed.max_tokens, parsed.sampling.min_tokens, parsed.stop_ids
        )
        returned = asked.num_returned or asked.width
        request.beams = BeamRequest(search, origin, returned, self.limits().vocab_size)
        self._searches += 1
        self._queue_beams(request.beams)

    def _queue_beams(self, beams: BeamRequest) -> None:
        for sequence in beams.sequences:
            self._waiting.push(sequence)
        self._pump_soon()

    def _replay(self, request: Request, parsed: ParsedRequest) -> pb.Finish | None:
        """Brings the text up to the resumed tokens; how the request ended if they end it."""
        resumed = parsed.resumed
        if not resumed:
            return None
        stopped = resumed[-1] in parsed.stop_ids and len(resumed) > parsed.sampling.min_tokens
        if request.text is not None:
            for token in resumed[: -1 if stopped else None]:
                request.text.feed(token)
        return request.end_after(resumed[-1], stopped, len(resumed) >= parsed.max_tokens)

    # Steps

    def _pump_soon(self) -> None:
        """Plans once for all events of this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump_or_end)

    def _pump_or_end(self) -> None:
        """Planning that fails has left the books half written: nothing after it can be trusted."""
        try:
            self._pump()
        except Exception as error:
            self._on_fatal(error)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._full_since is None:
            self._drain_rate.rest(time.monotonic())
        progress = True
        while progress:
            self._admit()
            progress = False
            for worker in self._workers.values():
                if len(worker.batch.in_flight) < self._run_ahead(worker):
                    progress |= self._send_step(worker)
        if not len(self._waiting) or not self.ready:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = time.monotonic()
        for worker in self._workers.values():
            if worker.draining and worker.batch.idle and not worker.left:
                worker.left = True
                worker.link.leave()

    def _admit(self) -> None:
        for admitted in self._admission.admit():
            sequence = admitted.sequence
            request: Request = sequence.owner
            if admitted.worker is None:
                self._fail_too_large(sequence)
                continue
            self._worker_of[admitted.worker].streams.occupy(sequence.slot, request)
            if request.queue_seconds is None:
                now = time.monotonic()
                if self._full_since is not None:
                    self._drain_rate.left(now)
                request.queue_seconds = now - request.received
                metrics.PROMPT_TOKENS.inc(len(sequence.prompt))
                metrics.CACHED_TOKENS.inc(sequence.cached_tokens or 0)
                metrics.QUEUE_SECONDS.observe(request.queue_seconds)

    def _run_ahead(self, worker: ReadyWorker) -> int:
        """Steps to keep in flight: short ones must cover the round trip between them."""
        short = worker.step_seconds < SHORT_STEP_SECONDS
        return max(self._config.run_ahead, SHORT_STEP_RUN_AHEAD if short else 0)

    def _send_step(self, worker: ReadyWorker) -> bool:
        before = self._admission.preemptions
        plan = worker.batch.plan()
        metrics.PREEMPTIONS.inc(self._admission.preemptions - before)
        if plan is None:
            return False
        worker.link.send(encode_step(plan))
        return True

    # Results

    def _deliver(
        self, worker: ReadyWorker, outcome: StepOutcome, logprobs: StepLogprobs | None
    ) -> None:
        """Hands one token of each row to its client, and ends the sequences that are done."""
        streams = worker.streams
        if logprobs is not None:
            logprobs = logprobs.of(outcome.valid)
        if self._searches:
            requests = streams.owners(outcome.slots)
            plain = np.array([request.beams is None for request in requests], dtype=np.bool_)
            self._take_beams(worker, outcome, requests, logprobs, np.flatnonzero(~plain).tolist())
            outcome = outcome.only(plain)
            if not len(outcome.slots):
                return
            logprobs = None if logprobs is None else logprobs.of(plain)
        for request in streams.first_tokens(outcome.slots):
            metrics.FIRST_TOKEN_SECONDS.observe(time.monotonic() - request.received)
        candidates = {}
        if logprobs is not None:
            requests = streams.owners(outcome.slots)
            candidates = encode_logprobs(requests, logprobs, self.tokenizer.token_bytes)
        for row in streams.deliver(outcome, candidates):
            slot = int(outcome.slots[row])
            request = streams.owner(slot)
            worker.batch.finish(slot, State.COMPLETED)
            token = int(outcome.tokens[row])
            finish = request.end_after(token, bool(outcome.stopped[row]), bool(outcome.ended[row]))
            assert finish is not None
            self._close(request, State.COMPLETED, finish)

    def _take_beams(
        self,
        worker: ReadyWorker,
        outcome: StepOutcome,
        requests: list[Request],
        logprobs: StepLogprobs | None,
        rows: list[int],
    ) -> None:
        """Ends the beams at some rows of a step, and the rounds that they were the last of."""
        at = {} if logprobs is None else {row: i for i, row in enumerate(logprobs.rows.tolist())}
        for row in rows:
            request, slot = requests[row], int(outcome.slots[row])
            if not request.open:
                continue
            sequence = worker.batch.finish(slot, State.COMPLETED, keep=True)
            assert request.beams is not None
            if logprobs is None or row not in at:
                error = RequestError(Code.INTERNAL, "the worker sent no log probabilities")
                self._stop(request, State.FAILED, error_finish(error))
                continue
            ids, values = logprobs.ids[at[row], 1:], logprobs.values[at[row], 1:]
            if request.beams.answer(sequence, ids, values):
                self._next_round(request, request.beams)

    def _next_round(self, request: Request, beams: BeamRequest) -> None:
        self._forget(beams.next_round())
        if not beams.done:
            self._queue_beams(beams)
            return
        decode = self._decode if request.text is not None else None
        finish = beams.finish(decode, request.include_stop_token)
        self._close(request, State.COMPLETED, finish)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        detokenizer = self.tokenizer.detokenizer()
        return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()

    def _forget(self, sequences: list[Sequence]) -> None:
        """Workers need not keep the KV of these ended sequences any longer."""
        for worker in self._workers.values():
            for sequence in sequences:
                worker.batch.forget(sequence.arrival)

    def _on_slot_error(self, worker: ReadyWorker, error: worker_pb.SlotError) -> None:
        if not worker.batch.slots.live[error.slot]:
            return
        request = worker.streams.owner(error.slot)
        sequence = worker.batch.finish(error.slot, State.PENDING, sound=False)
        attempts = sequence.record_failure()
        log.warning("request %s failed on a worker: %s", request.request_id, error.message)
        if error.retryable and attempts <= self._config.max_retry_attempts:
            self._waiting.push(sequence)
            return
        failure = RequestError(Code.INTERNAL, f"the worker failed: {error.message}")
        self._stop(request, State.FAILED, error_finish(failure))

    def _fail_guilty(self, sequence: Sequence) -> None:
        request: Request = sequence.owner
        error = RequestError(
            Code.INTERNAL,
            f"{sequence.failures} workers in a row were lost while they computed this request, the "
            "last one with nothing else to compute; it is not run again",
        )
        log.error("request %s took %d workers down", request.request_id, sequence.failures)
        self._stop(request, State.FAILED, error_finish(error))

    def _fail_too_large(self, sequence: Sequence) -> None:
        error = RequestError(
            Code.RESOURCE_EXHAUSTED,
            f"the request needs KV for {sequence.max_computed} tokens, more than any worker that "
            "is ready now holds",
        )
        self._stop(sequence.owner, State.FAILED, error_finish(error))

    # The end

    def _abort(self, request: Request | None) -> bool:
        if request is None or not request.open:
            return False
        self._stop(request, State.CANCELLED, pb.Finish(reason=pb.FINISH_REASON_ABORT))
        return True

    def _expire(self, request: Request, deadline_ms: int) -> None:
        """Its deadline has come."""
        error = RequestError(
            Code.DEADLINE_EXCEEDED,
            f"the request did not end within its deadline_ms of {deadline_ms} ms; "
            "give it more time or lower max_tokens",
            "deadline_ms",
        )
        self._stop(request, State.FAILED, error_finish(error))

    def _stop(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends an open request wherever it is: being parsed, waiting or running."""
        for sequence in request.sequences:
            if not self._waiting.remove(sequence):
                self._finish_running(sequence)
        self._close(request, state, finish)
        self._pump_soon()

    def _publish(self) -> None:
        """Lets metrics read the state when they are asked for, which costs a step nothing.

        They are asked for on another thread, hence the copies: `list` of a dict's values is one
        operation under the interpreter's lock.
        """

        def in_state(state: State) -> int:
            requests = list(self._open.values())
            return sum(any(s.state is state for s in r.sequences) for r in requests)

        for state in (State.PENDING, State.PREFILL, State.DECODE):
            gauge = metrics.OPEN_REQUESTS.labels(state.name.lower())
            gauge.set_function(partial(in_state, state))
        metrics.BLOCKS.labels("used").set_function(lambda: self._blocks(lambda pool: pool.used))
        metrics.BLOCKS.labels("total").set_function(lambda: self._blocks(lambda pool: pool.total))
        metrics.KV_WASTE.set_function(self._kv_waste)
        metrics.READY_WORKERS.set_function(lambda: len(self._admission.workers))

    def _blocks(self, count: Callable[[BlockPool], int]) -> int:
        return sum(count(worker.batch.pool) for worker in list(self._workers.values()))

    def _kv_waste(self) -> float:
        batches = [worker.batch for worker in list(self._workers.values())]
        places = sum(batch.pool.used * batch.limits.block_size for batch in batches)
        return sum(batch.unused_places for batch in batches) / max(1, places)

    def _finish_running(self, sequence: Sequence) -> None:
        for worker in self._workers.values():
            if worker.batch.slots.sequences[sequence.slot] is sequence:
                worker.batch.finish(sequence.slot, State.CANCELLED)
                return

    def _close(self, request: Request, state: State, finish: pb.Finish) -> None:
        request.open = False
        if request.deadline is not None:
            request.deadline.cancel()
        del self._open[id(request.buffer), request.stream]
        del self._by_id[request.request_id]
        metrics.REQUESTS.labels(state.name.lower()).inc()
        completion_tokens = 0
        if request.beams is not None:
            self._searches -= 1
            self._forget(request.beams.close())
            finish.usage.CopyFrom(request.beams.usage())
        elif request.sequence is not None:
            request.sequence.state = state
            completion_tokens = len(request.sequence.output)
            finish.usage.prompt_tokens = len(request.sequence.prompt)
            finish.usage.completion_tokens = completion_tokens
            finish.usage.cached_tokens = request.sequence.cached_tokens or 0
            if request.sequence.sampling.logprobs is not None:
                finish.cumulative_logprob = request.cumulative_logprob
        if request.queue_seconds is not None:
            finish.queue_seconds = request.queue_seconds
        rest = request.text.flush() if request.text is not None and not request.beams else ""
        request.buffer.add_finish(request.stream, finish, completion_tokens, rest)
        if not self._open:
            self.all_closed.set()


def _deadline(request: Request, deadline_ms: int | None) -> int:
    """When the request should have ended, in milliseconds of the monotonic clock."""
    return int(request.received * 1000) + (deadline_ms or USUAL_DEADLINE_MS)


def _worker_limits(config: SchedulerConfig, info: worker_pb.WorkerInfo) -> WorkerLimits:
    budget = min(config.max_num_batched_tokens or 2**31, info.max_num_batched_tokens)
    return WorkerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        num_slots=min(config.max_num_seqs or 2**31, info.num_slots, budget),
        max_num_batched_tokens=budget,
        memory_threshold=config.memory_threshold,
        prefix_caching=config.prefix_caching,
        prefix_groups=info.prefix_groups,
    )
