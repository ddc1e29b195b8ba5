"""Runs the steps of a stream on the backend, in order, outside the event loop."""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagewire.errors import Code, RequestError
from pagewire.lifecycle.watchdog import Watched
from pagewire.packing import pack, pack_floats
from pagewire.rpc.checksums import summary
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.backend import Backend, Outcome
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.protocol.session import Session
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import DraftReport, TakenRows, first_rows
from pagewire.worker.protocol.steps.slots import PlannedStep, SlotFailure

log = logging.getLogger(__name__)

# The counts of a step without drafts, in which each row has one token.
NO_COUNTS = np.empty(0, np.int32)
# While sequences run, the scheduler sends a step as soon as one is answered. After this many
# seconds without a step, it has ended them; the protocol has no message for that.
IDLE_SECONDS = 1.0


class StepExecutor:
    """Runs steps on threads of its own. `step` and `finish` only queue, from any thread.

    The launcher thread plans and submits steps. If the backend is not synchronous, a second thread,
    the collector, waits for the device, so that the launcher never does. All answers pass through
    the collector, or else the launcher, which keeps them in the order of the steps.
    """

    def __init__(
        self,
        backend: Backend,
        launcher: QueueThread,
        metrics: WorkerMetrics,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`on_fatal` is called when the device is lost; it should end the process."""
        self._backend = backend
        self._launcher = launcher
        self._collector = None if backend.synchronous else QueueThread("collector", on_fatal)
        self.metrics = metrics
        self._on_fatal = on_fatal
        self._submitted = self._answered = 0  # steps; each is written by one thread
        self._num_sequences = 0  # in the latest step
        self._answered_at = 0.0
        metrics.count_slots(self._slots_in_use)

    @property
    def row_costs(self) -> RowCosts | None:
        """The time of rows on the backend; None unless the backend drafts."""
        return self._backend.row_costs

    def step(self, session: Session, message: pb.Step) -> None:
        """Queues a step; its answer is posted to the session."""
        self._launcher.post(partial(self._launch, session, message))

    def finish(self, session: Session, error: RequestError | None) -> None:
        """Ends a stream after the answers to its earlier steps; `error` None is a regular end."""
        self._launcher.post(partial(self._then, partial(session.post, error)))

    async def settled(self) -> None:
        """Waits until everything queued so far has been computed and answered."""
        for thread in (self._launcher, self._collector):
            if thread is not None:
                await thread.call(lambda: None)

    def watched(self) -> list[Watched]:
        """The threads that compute, for a watchdog."""
        threads = [self._launcher, self._collector]
        return [thread.watched() for thread in threads if thread is not None]

    def close(self) -> None:
        """Computes the queued steps, then ends the threads."""
        self._launcher.close()
        if self._collector is not None:
            self._collector.close()

    def _launch(self, session: Session, message: pb.Step) -> None:
        if session.closed:
            return
        try:
            planned = session.plan(message)
        except RequestError as error:
            log.warning("step %d is refused, %s: %s", message.step, summary(message), error)
            self._end_stream(session, error)
            return
        except Exception as error:
            log.exception("step %d cannot be planned, %s", message.step, summary(message))
            self._end_stream(session, RequestError(Code.INTERNAL, f"step {message.step}: {error}"))
            return
        copies = planned.plan.host_copies
        if copies is not None:
            try:
                self._backend.copy(copies)
            except Exception as error:
                # The scheduler would use blocks with the wrong content.
                self._on_fatal(error)
                return
            self.metrics.saved_blocks.inc(len(copies.saved))
            self.metrics.loaded_blocks.inc(len(copies.loaded))
        self._num_sequences = _num_sequences(planned.plan)
        self._submitted += 1
        answer = partial(self._answer, session, message.step, planned)
        try:
            handle = self._backend.submit(planned.plan)
        except Exception as error:
            failed = self._failed_step(planned.plan, error)
            self._then(partial(answer, failed))
        else:
            self._then(partial(self._collect, planned.plan, handle, answer))
        session.launched()

    def _end_stream(self, session: Session, error: RequestError) -> None:
        self._then(partial(session.post, error))
        # The slots no longer match the scheduler's, so queued steps are dropped.
        self._then(partial(setattr, session, "closed", True))

    def _then(self, call: Callable[[], object]) -> None:
        """Runs `call` after the steps launched so far are answered."""
        if self._collector is None:
            call()
        else:
            self._collector.post(call)

    def _collect(
        self, plan: DevicePlan, handle: object, answer: Callable[[Outcome | RequestError], None]
    ) -> None:
        try:
            outcome = self._backend.wait(handle)
        except Exception as error:
            answer(self._failed_step(plan, error))
        else:
            if plan.masks is not None:
                plan.masks.wait()  # the masks are ready, but failed rows may not be listed yet
                if outcome.taken is None:
                    plan.masks.advance(outcome.tokens)
            self._measure(plan, outcome)
            answer(outcome)

    def _failed_step(self, plan: DevicePlan, error: Exception) -> RequestError:
        if self._backend.is_fatal(error):
            self._on_fatal(error)
        if plan.masks is not None:
            plan.masks.abandon()
        log.error("a step of %d rows failed", len(plan.sample_slots), exc_info=error)
        return RequestError(Code.INTERNAL, f"the step failed: {type(error).__name__}: {error}")

    def _answer(
        self,
        session: Session,
        number: int,
        planned: PlannedStep,
        outcome: Outcome | RequestError,
    ) -> None:
        failures, rows, counts = list(planned.failures), planned.rows, NO_COUNTS
        logprobs: dict[str, bytes] = {}
        drafts: dict[str, bytes] = {}
        prompt_logprobs: pb.PromptLogprobs | None = None
        pooled = b""
        if isinstance(outcome, RequestError):
            failures += _fail_all(session, planned.plan, outcome.message)
            tokens, duration = np.full(len(first_rows(planned.plan)), -1, np.int32), 0
        else:
            failures += self._fail_rows(session, planned.plan, outcome)
            session.slots.take(planned.plan, outcome.tokens, outcome.taken, outcome.right)
            slots, tokens, scores = planned.plan.sample_slots, outcome.tokens, outcome.logprobs
            if outcome.taken is not None:
                of = TakenRows.of(planned.plan, outcome.taken, tokens, scores, rows)
                slots, tokens, scores = of.slots, of.tokens, of.logprobs
                report = _draft_report(planned.plan, outcome, outcome.taken)
                drafts = report.fields(rows)
                rows, counts = of.rows, of.counts
            tokens = np.where(session.slots.failed(slots), np.int32(-1), tokens)
            duration = outcome.duration_us
            if scores is not None:
                logprobs = scores.fields(tokens, rows)
            if (scored := outcome.prompt_logprobs) is not None:
                prompt_logprobs = scored.message(session.slots.failed(scored.rows.slots))
            if outcome.pooled is not None:
                pooled = pack_floats(outcome.pooled[tokens >= 0])
        if rows is not None:
            tokens = np.append(tokens, np.int32(-1))[rows]  # row -1 is the appended -1
        self.metrics.failures.inc(len(failures))
        session.post(
            pb.StepResult(
                step=number,
                token_ids=pack(tokens),
                token_counts=pack(counts),
                errors=[
                    pb.SlotError(
                        slot=f.slot, message=f.message, retryable=f.retryable, field=f.field
                    )
                    for f in failures
                ],
                duration_us=duration,
                prompt_logprobs=prompt_logprobs,
                pooled=pooled,
                **logprobs,
                **drafts,
            )
        )
        self._answered_at = time.monotonic()
        self._answered += 1

    def _slots_in_use(self) -> int:
        """The sequences of the latest step, until no step has come for `IDLE_SECONDS`."""
        waits = self._answered == self._submitted
        idle = waits and time.monotonic() - self._answered_at >= IDLE_SECONDS
        return 0 if idle else self._num_sequences

    def _fail_rows(self, session: Session, plan: DevicePlan, outcome: Outcome) -> list[SlotFailure]:
        failures = []
        masked = () if plan.masks is None else plan.masks.failures
        for failure in (*outcome.failures, *masked):
            slot = int(plan.sample_slots[failure.row])
            if session.slots.fail(slot):
                failures.append(
                    SlotFailure(slot, failure.message, failure.retryable, failure.field)
                )
                # Queued before the answer, so before any step that reuses the blocks.
                self._launcher.post(partial(self._scrub, session, slot))
        return failures

    def _scrub(self, session: Session, slot: int) -> None:
        try:
            self._backend.scrub(session.slots.blocks(slot))
        except Exception as error:
            # A NaN in the pool would spread to other sequences.
            self._on_fatal(error)

    def _measure(self, plan: DevicePlan, outcome: Outcome) -> None:
        metrics = self.metrics
        if outcome.taken is not None:
            report = _draft_report(plan, outcome, outcome.taken)
            metrics.drafts.count(report.drafters, report.drafted, report.accepted)
        metrics.steps.inc()
        metrics.decode_tokens.inc(plan.num_decodes)
        metrics.prefill_tokens.inc(plan.num_prefilled)
        metrics.step_seconds.observe(outcome.duration_us / 1e6)


def _num_sequences(plan: DevicePlan) -> int:
    chunks = 0 if plan.chunks is None else len(plan.chunks.slots)
    return plan.num_decodes - plan.num_drafts + chunks


def _draft_report(plan: DevicePlan, outcome: Outcome, taken: NDArray[np.bool_]) -> DraftReport:
    return DraftReport.of(plan, taken, outcome.drafted, outcome.drafters)


def _fail_all(session: Session, plan: DevicePlan, message: str) -> list[SlotFailure]:
    """Fails every sequence that a step computed or changed. Running it again may succeed."""
    touched = [plan.decode_slots]
    touched += [part.slots for part in (plan.starts, plan.writes, plan.chunks) if part is not None]
    slots = dict.fromkeys(np.concatenate(touched).tolist())  # in order, each once
    return [
        SlotFailure(slot, message, retryable=True) for slot in slots if session.slots.fail(slot)
    ]
