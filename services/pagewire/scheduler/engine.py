"""The control loop: requests in, steps out to the workers, deltas back to the clients.

Everything here runs on one event loop and only in answer to an event: an arrival, an abort, a
worker's answer, a worker gained or lost. Nothing polls.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from pagewire.config import SchedulerConfig
from pagewire.errors import Code, RequestError
from pagewire.lifecycle.process import end_process
from pagewire.packing import unpack
from pagewire.rpc.checksums import summary
from pagewire.scheduler import metrics
from pagewire.scheduler.beam_rounds import BeamRounds
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.routing import ROUTERS
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.load import load, publish
from pagewire.scheduler.policies import make_policy
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.arrivals import Parser, begin, replay
from pagewire.scheduler.requests.beam_request import reserved_arrivals
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.large_requests import Arrival
from pagewire.scheduler.requests.open_request import Request, encode_logprobs, error_finish
from pagewire.scheduler.requests.open_requests import OpenRequests
from pagewire.scheduler.requests.parsing import ModelLimits, ParsedRequest
from pagewire.scheduler.requests.queue_bounds import QueueBounds
from pagewire.scheduler.requests.solitude import Solitude
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.requests.text_helper import TextHelpers
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.absence import Absence
from pagewire.scheduler.workers.link import WorkerLink, encode_step
from pagewire.scheduler.workers.ready_workers import ReadyWorker, ReadyWorkers
from pagewire.scheduler.workers.slot_streams import SlotStreams
from pagewire.scheduler.workers.worker_info import worker_limits
from pagewire.suspicion import LOSS_TIMEOUT_SECONDS, Loss, Suspicion
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb

log = logging.getLogger(__name__)

# Requests of a client that has gone which are ended in one turn of the loop.
ABORTED_AT_ONCE = 256
# How often suspects are looked at that must not run yet; without any there is nothing to look at.
LOOK_AT_HELD_SECONDS = 0.25


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
        self.created = int(time.time())
        self.instance_id = uuid.uuid4().hex
        self.solitude = Solitude(self._make_room)
        self._config = config
        self._on_readiness = on_readiness
        self._policy = make_policy(config.policy)
        self._admission = Admission(
            self._policy, ROUTERS[config.routing](), max(1, config.max_retry_attempts)
        )
        # By worker: what is not known yet, whether its process ended.
        self._losses: dict[str, Loss] = {}
        self._pump_later: asyncio.TimerHandle | None = None
        self._waiting = self._admission.waiting
        self._workers = ReadyWorkers()
        self._open = OpenRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = 0
        self.helpers = TextHelpers(config)
        self._parser = Parser(
            model, tokenizer, self.helpers, self._policy, config.policy, self.limits
        )
        self._bounds = QueueBounds(config, self._waiting)
        self._searches = BeamRounds(self, tokenizer)
        self._pump_scheduled = False
        self._absence = Absence(config.hand_back_after, config.no_worker_timeout, self._pump_soon)
        publish(self._open, self._workers, self._admission)

    # What clients ask for

    def submit(
        self,
        arrival: Arrival,
        buffer: DeltaBuffer,
        stream: int,
        moved: bool = False,
        owner: str = "",
        worker_losses: pb.WorkerLosses | None = None,
    ) -> None:
        """Takes a request; its deltas and its end go to `buffer` under the number `stream`.

        `moved` is whether it has run or waited elsewhere before, `worker_losses` what happened
        there. One without an id is given one. `owner` is the name of the API key whose ids it
        shares; it is empty for all peers.
        """
        message = arrival.message
        self._arrivals += 1
        message.request_id = message.request_id or f"request-{uuid.uuid4().hex}"
        # Peers only: tokens to resume from must not be a way around the bounds of the queue.
        moved = moved or (arrival.resumes and not owner)
        received = time.monotonic()
        request = Request(message.request_id, buffer, stream, received, self._arrivals, moved)
        request.owner = owner
        request.worker_losses = worker_losses
        self._arrivals += reserved_arrivals(message.beam_search.width)
        if self.solitude.is_for(buffer):
            self._make_room()  # what was tried before has stood the trial
        refusal = self._refusal(message, request)
        if refusal is not None:
            metrics.REQUESTS.labels(State.FAILED.name.lower()).inc()
            buffer.add_finish(stream, error_finish(refusal), 0)
            return
        self._open.add(request)
        loop = asyncio.get_running_loop()
        if ms := message.deadline_ms:
            late = failures.deadline_passed(ms)
            request.deadline = loop.call_later(ms / 1000, self._fail, request, late)
        self._bounds.parsing += 1
        request.parsing = loop.create_task(self._parse_and_queue(arrival, request))
        self._tasks.add(request.parsing)
        request.parsing.add_done_callback(self._tasks.discard)

    def abort(self, buffer: DeltaBuffer, stream: int) -> bool:
        """Ends a request by its place; whether it was open."""
        return self._abort(self._open.at(buffer, stream))

    def abort_by_id(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a request by its id, of one owner or of any; whether it was open."""
        found = [self._abort(request) for request in self._open.named(request_id, owner)]
        return any(found)

    def is_alone(self, buffer: DeltaBuffer) -> bool:
        """Whether a gateway has this scheduler alone, and nothing of others is open any more."""
        return self.solitude.is_for(buffer) and self._open.are_all_of(buffer)

    def _make_room(self) -> None:
        """Gives back all that gateways can continue elsewhere; what they cannot ends here."""
        for request in self._open.that_move():
            self._give_back(request, failures.another_is_tried())

    def abort_all(self, buffer: DeltaBuffer) -> None:
        """Ends every request of a client that has gone."""
        self._abort_each(self._open.of(buffer))

    def limits(self) -> ModelLimits:
        """What the workers can take; UNAVAILABLE before the first of them is ready."""
        limits = self._workers.limits
        if limits is None:
            raise RequestError(Code.UNAVAILABLE, "no worker is ready yet; try again later")
        return limits

    def models(self) -> pb.ListModelsResponse:
        """The model, once a worker has been ready to serve it."""
        limits = self._workers.limits
        if limits is None:
            return pb.ListModelsResponse()
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
        return load(self._workers, self._admission, self._bounds)

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        return bool(self._admission.batches)

    @property
    def all_closed(self) -> asyncio.Event:
        """Set while no request is open."""
        return self._open.all_closed

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # What workers say (WorkerEvents)

    def on_ready(self, link: WorkerLink, info: worker_pb.WorkerInfo) -> None:
        """See WorkerEvents."""
        if info.model != self.model:
            raise ValueError(f"it serves the model {info.model!r}, this scheduler {self.model!r}")
        limits = worker_limits(self._config, info)
        batch = self._admission.add_worker(limits, time.monotonic())
        loss = self._losses.pop(link.address, None)
        if loss is not None:
            loss.resolve(info.instance_id)
            self._judge()
        worker = ReadyWorker(
            link, info, batch, SlotStreams(limits.num_slots, self.tokenizer.token_texts)
        )
        if self._config.tpot_slo_ms is not None:
            worker.aim_at(self._config.tpot_slo_ms)
        self._workers.add(worker)
        self._workers_changed()
        self._pump_soon()

    def on_draining(self, link: WorkerLink) -> None:
        """See WorkerEvents."""
        worker = self._workers.by_link.get(link)
        if worker is None or worker.draining:
            return
        worker.draining = True
        self._admission.drain_worker(worker.batch)
        self._workers_changed()
        self._pump_soon()

    def on_serving(self, link: WorkerLink) -> None:
        """See WorkerEvents."""
        worker = self._workers.by_link.get(link)
        if worker is None or not worker.draining or worker.left:
            return
        log.info("worker %s takes sequences again", link.address)
        worker.draining = False
        self._admission.resume_worker(worker.batch)
        self._workers_changed()
        self._pump_soon()

    def on_lost(self, link: WorkerLink) -> None:
        """See WorkerEvents."""
        worker = self._workers.remove(link)
        if worker is None:
            return
        loss = None
        if not link.has_said_why:
            loss = Loss(worker.info.instance_id, ended=True if link.hung else None)
        again = self._admission.lose_worker(worker.batch, loss, time.monotonic())
        if worker.draining and not again:
            log.info("worker %s has drained and is left", link.address)
        else:
            metrics.WORKER_LOSSES.inc()
            log.warning("worker %s is lost; %d sequences run again", link.address, len(again))
        if link.hung:
            self._judge()
        elif loss is not None:
            self._losses[link.address] = loss
            asyncio.get_running_loop().call_later(LOSS_TIMEOUT_SECONDS, self._explain, loss)
        self._workers_changed()
        self._pump_soon()

    def on_result(self, link: WorkerLink, result: worker_pb.StepResult) -> None:
        """See WorkerEvents. ValueError for a result that changed nothing and breaks the link.

        Any other error has left the books half written, and must end the process.
        """
        worker = self._workers.by_link[link]
        try:
            outcome, logprobs = self._commit(worker, result)
        except ValueError:
            log.error("%s of step %d is no answer to it", summary(result), result.step)
            raise
        except Exception as error:
            raise _failed_at(link, result) from error
        try:
            self._take(worker, result, outcome, logprobs)
        except Exception as error:
            raise _failed_at(link, result) from error

    def _commit(
        self, worker: ReadyWorker, result: worker_pb.StepResult
    ) -> tuple[StepOutcome, StepLogprobs | None]:
        logprobs = StepLogprobs.read(result)
        worker.observe(result.duration_us)
        for error in result.errors:
            worker.batch.slot_failed(error.slot)
        outcome = worker.batch.commit(result.step, unpack(result.token_ids))
        metrics.STEP_SECONDS.observe(worker.step_seconds)
        return outcome, logprobs

    def _take(
        self,
        worker: ReadyWorker,
        result: worker_pb.StepResult,
        outcome: StepOutcome,
        logprobs: StepLogprobs | None,
    ) -> None:
        for error in result.errors:
            self._on_slot_error(worker, error)
        if len(outcome.slots):
            metrics.OUTPUT_TOKENS.inc(len(outcome.slots))
            self._deliver(worker, outcome, logprobs)
        if self._config.check_invariants:
            worker.batch.check()
        if worker.draining or self._waiting:
            self._pump_soon()
        elif not self._pump_scheduled:
            self._or_end(self._go_on, worker)

    def _explain(self, loss: Loss) -> None:
        """A worker has not returned for so long that it is taken to have ended."""
        if loss.ended is None:
            loss.resolve("")
            self._judge()

    def _judge(self) -> None:
        """It is known whether a worker has ended, and so perhaps by whom."""
        for sequence in self._admission.remove_deadly():
            request: Request = sequence.owner
            failure = failures.took_workers_down(sequence)
            log.error("request %s: %s", request.request_id, failure.message)
            self._fail(request, failure)
        self._pump_soon()

    def _workers_changed(self) -> None:
        self._absence.note(self.ready)
        self._on_readiness()

    # Arrival

    def _refusal(self, message: pb.GenerateRequest, request: Request) -> RequestError | None:
        if self.draining:
            return RequestError(Code.UNAVAILABLE, "this scheduler is draining; use another one")
        if self.solitude.excludes(request.buffer):
            return failures.another_is_tried()
        conflict = self._open.conflict(request)
        return conflict or self._bounds.refusal(request.moved, tokens=0)

    async def _parse_and_queue(self, arrival: Arrival, request: Request) -> None:
        try:
            parsed = await self._parser.parse(arrival)
        except RequestError as error:
            self._end_parsing(request)
            if request.open:
                self.close(request, State.FAILED, error_finish(error))
            return
        self._end_parsing(request)
        try:
            if request.open:
                await self._queue(request, parsed)
        except Exception:
            log.exception("request %s could not be queued", request.request_id)
            self.close(request, State.FAILED, error_finish(failures.unqueued()))

    def _end_parsing(self, request: Request) -> None:
        if request.parsing is not None:
            request.parsing = None
            self._bounds.parsing -= 1

    async def _queue(self, request: Request, parsed: ParsedRequest) -> None:
        sequence = begin(request, parsed)
        if (told := request.worker_losses) is not None:
            suspicion = Suspicion.from_report(told.workers, list(told.alone), time.monotonic())
            self._admission.set_suspicion(sequence, suspicion)
        ended = await replay(request, parsed)
        if not request.open:
            return
        if ended is not None:
            self.close(request, State.COMPLETED, ended)
            return
        full = self._bounds.refusal(request.moved, sequence.num_known)
        if full is not None:
            self.close(request, State.FAILED, error_finish(full))
            return
        if not request.moved and not self._workers.may_take(sequence):
            self.close(request, State.FAILED, error_finish(failures.too_large(sequence)))
            return
        if parsed.beam_search is not None:
            self._searches.begin(request, parsed, self.limits().vocab_size)
            return
        self.enqueue([sequence])

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Lets sequences wait for admission."""
        for sequence in sequences:
            self._waiting.push(sequence)
        self._pump_soon()

    # Steps

    def _pump_soon(self) -> None:
        """Plans once for all events of this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._or_end, self._pump)

    def _or_end(self, plan: Callable[..., object], *args: ReadyWorker) -> None:
        """Planning that fails has left the books half written: nothing after it can be trusted."""
        try:
            plan(*args)
        except Exception as error:
            self._on_fatal(error)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._bounds.rest(time.monotonic())
        progress = True
        while progress:
            self._admit()
            progress = False
            for worker in self._workers:
                if worker.wants_step(self._config.run_ahead):
                    progress |= self._send_step(worker)
        if not self.ready:
            self._give_up_waiting()
        if self._admission.held and self._pump_later is None:
            self._pump_later = asyncio.get_running_loop().call_later(
                LOOK_AT_HELD_SECONDS, self._look_at_held
            )
        self._bounds.settle(self.ready)
        for worker in self._workers:
            if worker.draining and worker.batch.idle and not worker.left:
                worker.left = True
                worker.link.leave()

    def _look_at_held(self) -> None:
        self._pump_later = None
        self._pump_soon()

    def _go_on(self, worker: ReadyWorker) -> None:
        """Plans for a worker that has answered; while nobody waits that is nothing to others."""
        while worker.wants_step(self._config.run_ahead) and self._send_step(worker):
            pass
        if self._waiting:  # somebody gave his place up
            self._pump_soon()

    def _admit(self) -> None:
        for admitted in self._admission.admit(time.monotonic()):
            sequence = admitted.sequence
            request: Request = sequence.owner
            if admitted.batch is None:
                self._give_back(request, failures.no_worker_large_enough(sequence))
                continue
            self._workers.of(admitted.batch).streams.occupy(sequence.slot, request)
            if admitted.restart is not None:
                metrics.RETURNS.labels(admitted.restart.value).inc()
            if request.queue_seconds is None:
                now = time.monotonic()
                self._bounds.left(now)
                request.queue_seconds = now - request.received
                metrics.PROMPT_TOKENS.inc(len(sequence.prompt))
                metrics.CACHED_TOKENS.inc(sequence.cached_tokens or 0)
                metrics.QUEUE_SECONDS.observe(request.queue_seconds)

    def _give_up_waiting(self) -> None:
        """While no worker is ready: nobody waits for one longer than is stated."""
        for sequence in self._admission.runnable():
            request: Request = sequence.owner
            seconds = self._absence.too_long_for(request.buffer.moves)
            if request.open and seconds is not None:
                self._give_back(request, failures.no_worker(seconds))

    def _give_back(self, request: Request, failure: RequestError) -> None:
        """Ends what cannot run here: a gateway continues it elsewhere, after the tokens it has."""
        if request.buffer.moves:
            log.info("request %s goes back: %s", request.request_id, failure.message)
            metrics.HANDED_BACK.inc()
            request.text = None  # what the text holds back comes from where it goes on
            finish = error_finish(failure)
            told = [s.suspicion for s in request.sequences if s.suspicion and not s.state.final]
            if told:
                worst = max(told, key=lambda suspicion: suspicion.losses)
                finish.worker_losses.workers = worst.losses
                finish.worker_losses.alone.extend(trial.took for trial in worst.crashed_trials)
            self.stop(request, State.CANCELLED, finish)
        else:
            self._fail(request, failure)

    def _send_step(self, worker: ReadyWorker) -> bool:
        before = self._admission.preemptions
        plan = worker.batch.plan()
        if self._admission.preemptions > before:
            metrics.PREEMPTIONS.inc(self._admission.preemptions - before)
        if plan is None:
            return False
        if plan.copies is not None:
            metrics.SAVED_BLOCKS.inc(len(plan.copies.saved))
            metrics.LOADED_BLOCKS.inc(len(plan.copies.loaded))
        worker.link.send(encode_step(plan))
        return True

    # Results

    def _deliver(
        self, worker: ReadyWorker, outcome: StepOutcome, logprobs: StepLogprobs | None
    ) -> None:
        """Hands one token of each row to its client, and ends the sequences that are done."""
        streams = worker.streams
        if logprobs is not None and outcome.valid is not None:
            logprobs = logprobs.of(outcome.valid)
        if self._searches:
            outcome, logprobs = self._searches.take(worker, outcome, logprobs)
            if not len(outcome.slots):
                return
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
            finish = request.end_after(token, row in outcome.stopped, row in outcome.ended)
            assert finish is not None
            self.close(request, State.COMPLETED, finish)

    def forget(self, sequences: list[Sequence]) -> None:
        """Workers need not keep the KV of these ended sequences any longer."""
        self._workers.forget(sequences)

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
        self._fail(request, failures.failed_on_worker(error.message))

    # The end

    def _abort_each(self, requests: list[Request]) -> None:
        for request in requests[:ABORTED_AT_ONCE]:
            self._abort(request)
        if rest := requests[ABORTED_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._abort_each, rest)

    def _abort(self, request: Request | None) -> bool:
        if request is None or not request.open:
            return False
        self.stop(request, State.CANCELLED, pb.Finish(reason=pb.FINISH_REASON_ABORT))
        return True

    def _fail(self, request: Request, failure: RequestError) -> None:
        self.stop(request, State.FAILED, error_finish(failure))

    def stop(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends an open request wherever it is: being parsed, waiting or running."""
        if request.parsing is not None:
            request.parsing.cancel()
            self._end_parsing(request)
        for sequence in request.sequences:
            if not self._admission.remove(sequence):
                self._workers.finish(sequence)
        self.close(request, state, finish)
        self._pump_soon()

    def close(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends a request of which nothing waits or runs."""
        if request.beams is not None:
            self._searches.end(request.beams)
        self._open.close(request, state, finish)


def _failed_at(link: WorkerLink, result: worker_pb.StepResult) -> RuntimeError:
    """Says what was received when the engine failed, without quoting it."""
    received = f"{summary(result)} of step {result.step} from worker {link.address}"
    return RuntimeError(f"the engine failed at {received}")
