"""The control loop: requests in, steps out to the workers, results back to the clients.

Everything here runs on one event loop, and only after an event: a request arrives or ends, a worker
answers, connects or is lost. There is no polling, except while suspects are held.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial

from pagewire.config import SchedulerConfig
from pagewire.lifecycle.process import end_process
from pagewire.packing import Float32Array, unpack
from pagewire.rpc.checksums import summary
from pagewire.scheduler import load, metrics
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.policies import make_admission, make_policy
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.scheduler.snapshots.snapshot import Snapshots
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.stages.intake import Intake
from pagewire.scheduler.stages.losses import WorkerLosses
from pagewire.scheduler.stages.pooled import deliver_vectors, read_vectors
from pagewire.scheduler.stages.prompts import Prompts
from pagewire.scheduler.stages.results import Results
from pagewire.scheduler.stages.token_runs import TokenRuns
from pagewire.scheduler.text.output_formats import find_formats
from pagewire.scheduler.text.template_inputs import template_inputs
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.scheduler.workers.ready_workers import ReadyWorker, ReadyWorkers
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb

log = logging.getLogger(__name__)

# The interval of the checks while suspects are held.
CHECK_HELD_SECONDS = 0.25


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
        """`on_readiness` is called when workers join or leave, `on_fatal` when planning failed."""
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.instance_id = uuid.uuid4().hex
        self._config = config
        self._formats = find_formats(
            tokenizer.chat_template,
            config.tool_parser,
            config.reasoning_parser,
            tokenizer.token_id,
        )
        self._template_inputs = template_inputs(tokenizer.chat_template)
        self._on_readiness = on_readiness
        self._on_fatal = on_fatal
        self._plan_scheduled = False
        self._check_held: asyncio.TimerHandle | None = None
        policy = make_policy(config.policy)
        self._admission = make_admission(config, policy)
        self._waiting = self._admission.waiting
        self._admission.on_preempted = _trace_preemption
        self._workers = ReadyWorkers(
            config, model, tokenizer.token_texts, self._admission, self._plan_soon
        )
        self.endings = Endings(self._admission, self._workers, self._plan_soon)
        self._prompts = Prompts(tokenizer, self.endings)
        self.intake = Intake(
            config,
            model,
            tokenizer,
            policy,
            self._admission,
            self._workers,
            self.endings,
            self._prompts,
            self._plan_soon,
        )
        self._losses = WorkerLosses(self._admission, self.endings, self._plan_soon)
        self._results = Results(
            config.max_retry_attempts,
            tokenizer,
            self._workers,
            self.endings,
            self.intake.enqueue,
        )
        self.snapshots = Snapshots(self.instance_id, self._workers, self._admission)
        load.publish(self.endings.open, self._workers, self._admission)

    def models(self) -> pb.ListModelsResponse:
        """The model, once a worker has been ready to serve it."""
        return load.list_models(
            self.model,
            self._config.model,
            self.created,
            self.tokenizer,
            self._workers,
            self._formats,
            self._template_inputs,
        )

    def load(self) -> pb.Load:
        """The load of this scheduler."""
        return load.load(self._workers, self._admission, self.intake.bounds)

    def counts(self) -> pb.Load:
        """The load without its estimate of the wait; may be called on any thread."""
        return load.counts(self._workers, self._admission)

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        return bool(self._admission.batches)

    def num_running(self, link: WorkerLink) -> int:
        """How many sequences run on a worker."""
        worker = self._workers.by_link.get(link)
        return 0 if worker is None else worker.batch.num_running

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.endings.open)

    # Workers (WorkerEvents)

    def on_ready(self, link: WorkerLink, info: worker_pb.WorkerInfo) -> None:
        """Plans for a new worker; ValueError if it cannot serve the model."""
        self._workers.connect(link, info)
        self._losses.returned(link.address, info.instance_id)
        self._workers_changed()

    def on_draining(self, link: WorkerLink) -> None:
        """Admits no more sequences to the worker."""
        if self._workers.drain(link):
            self._workers_changed()

    def on_serving(self, link: WorkerLink) -> None:
        """Admits sequences to the worker again."""
        if self._workers.resume(link):
            self._workers_changed()

    def on_lost(self, link: WorkerLink) -> None:
        """Runs the worker's sequences again."""
        worker = self._workers.remove(link)
        if worker is not None:
            self._losses.lost(worker)
            self._workers_changed()

    def _workers_changed(self) -> None:
        self._on_readiness()
        self._plan_soon()

    def on_result(self, link: WorkerLink, result: worker_pb.StepResult) -> None:
        """Takes a result; ValueError if it is invalid, which breaks the link.

        Any other error leaves the state half changed, and must end the process.
        """
        worker = self._workers.by_link[link]
        try:
            vectors = None
            if worker.pooling is not None:
                vectors = read_vectors(result, worker.pooling.size)
            runs, outcome, logprobs = self._commit(worker, result)
        except ValueError:
            log.error("%s is not a valid result of step %d", summary(result), result.step)
            raise
        except Exception as error:
            raise _failed_at(link, result) from error
        try:
            self._take(worker, result, outcome, logprobs, vectors)
            if worker.batch.limits.max_drafts:
                self._take_later(worker, runs)
            self._go_on(worker)
        except Exception as error:
            raise _failed_at(link, result) from error

    def _commit(
        self, worker: ReadyWorker, result: worker_pb.StepResult
    ) -> tuple[TokenRuns | None, StepOutcome, StepLogprobs | None]:
        """Takes the first token of each row; the other ones are in the runs."""
        # This runs for every step: fields that are usually empty are checked before a call.
        logprobs = StepLogprobs.read(result) if result.logprob_rows else None
        runs = None
        if result.token_counts:
            runs = TokenRuns.read(result, logprobs, 1 + worker.batch.limits.max_drafts)
        worker.observe(result.duration_us)
        if result.errors:
            for error in result.errors:
                worker.batch.slot_failed(error.slot)
        if result.HasField("prompt_logprobs"):
            self._prompts.take(worker, result.prompt_logprobs)
        if worker.batch.in_flight:
            self.snapshots.steps.note(worker.batch, worker.batch.in_flight[0], result.duration_us)
        if runs is None:
            tokens = unpack(result.token_ids)
        else:
            tokens, logprobs = runs.first
        outcome = worker.batch.commit(result.step, tokens, result.duration_us)
        if runs is not None and (drafts := runs.drafts) is not None:
            runs.note_predicted(worker.batch, 0)
            metrics.DRAFTED.count(drafts.drafters, drafts.drafted, drafts.accepted)
        metrics.STEP_SECONDS.observe(worker.step_seconds)
        return runs, outcome, logprobs

    def _take(
        self,
        worker: ReadyWorker,
        result: worker_pb.StepResult,
        outcome: StepOutcome,
        logprobs: StepLogprobs | None,
        vectors: Float32Array | None,
    ) -> None:
        if result.errors:
            for error in result.errors:
                self._results.fail_slot(worker, error)
        if vectors is not None and worker.pooling is not None:
            deliver_vectors(worker, worker.pooling, outcome, vectors, self.endings)
        elif len(outcome.slots):
            metrics.OUTPUT_TOKENS.inc(len(outcome.slots))
            self._results.deliver(worker, outcome, logprobs)

    def _take_later(self, worker: ReadyWorker, runs: TokenRuns | None) -> None:
        """Takes the tokens after the first of each row, one place after the other.

        A sequence that a token ends is removed before its next token is read.
        """
        if runs is None:
            worker.batch.settle()
            return
        for place, rows, tokens, logprobs in runs.later():
            outcome = worker.batch.commit_more(rows, tokens)
            runs.note_predicted(worker.batch, place)
            if len(outcome.slots):
                metrics.OUTPUT_TOKENS.inc(len(outcome.slots))
                self._results.deliver(worker, outcome, logprobs)
        worker.batch.settle()

    def _go_on(self, worker: ReadyWorker) -> None:
        """Plans what comes after a result."""
        if self._config.check_invariants:
            worker.batch.check()
        if worker.draining or self._waiting:
            self._plan_soon()
        elif not self._plan_scheduled:
            self._guarded(self._plan_next, worker)

    # Planning

    def _plan_soon(self) -> None:
        """Plans once for all events of this turn of the loop."""
        if not self._plan_scheduled:
            self._plan_scheduled = True
            asyncio.get_running_loop().call_soon(self._guarded, self._plan_all)

    def _guarded(self, plan: Callable[..., object], *args: ReadyWorker) -> None:
        """Ends the process if planning fails: the state is half changed and cannot be trusted."""
        try:
            plan(*args)
        except Exception as error:
            self._on_fatal(error)

    def _plan_all(self) -> None:
        """Admits sequences that have room, and plans steps for every worker that wants one."""
        self._plan_scheduled = False
        bounds = self.intake.bounds
        bounds.skip_idle_time(time.monotonic())
        progress = True
        while progress:
            self._admit()
            progress = False
            for worker in self._workers:
                if worker.wants_step(self._config.run_ahead):
                    progress |= self._send_step(worker)
        if not self.ready:
            self.endings.give_overdue_back()
        if self._admission.held and self._check_held is None:
            self._check_held = asyncio.get_running_loop().call_later(
                CHECK_HELD_SECONDS, self._plan_for_held
            )
        bounds.after_admission(self.ready)
        for worker in self._workers:
            worker.leave_if_drained()

    def _plan_for_held(self) -> None:
        self._check_held = None
        self._plan_soon()

    def _plan_next(self, worker: ReadyWorker) -> None:
        """Plans for one worker that has answered; enough while no request waits."""
        while worker.wants_step(self._config.run_ahead) and self._send_step(worker):
            pass
        if self._waiting:  # planning has preempted a sequence
            self._plan_soon()

    def _admit(self) -> None:
        for admitted in self._admission.admit(time.monotonic()):
            sequence, batch = admitted.sequence, admitted.batch
            if batch is None:
                self.endings.give_back_too_large(sequence)
                continue
            worker = self._workers.of(batch)
            worker.streams.occupy(sequence.slot, sequence.owner)
            if sequence.traceparent:
                leave = partial(worker.link.end_trace, sequence.slot)
                sequence.owner.trace.admitted(worker.link.address, sequence, leave)
            if admitted.restart is not None:
                metrics.RETURNS.labels(admitted.restart.value).inc()
            self.intake.bounds.admitted(sequence.owner, sequence)

    def _send_step(self, worker: ReadyWorker) -> bool:
        """Plans the worker's next step and sends it; False if there is nothing to compute."""
        before = self._admission.preemptions
        plan = worker.batch.plan()
        if self._admission.preemptions > before:
            metrics.PREEMPTIONS.inc(self._admission.preemptions - before)
        if plan is None:
            return False
        if plan.copies is not None:
            metrics.SAVED_BLOCKS.inc(len(plan.copies.saved))
            metrics.LOADED_BLOCKS.inc(len(plan.copies.loaded))
        worker.send(plan)
        return True


def _trace_preemption(sequence: Sequence) -> None:
    if sequence.traceparent:
        sequence.owner.trace.preempted()


def _failed_at(link: WorkerLink, result: worker_pb.StepResult) -> RuntimeError:
    """The error of an engine that failed on a result: its size and checksum, not its content."""
    received = f"{summary(result)} of step {result.step} from worker {link.address}"
    return RuntimeError(f"the engine failed at {received}")
