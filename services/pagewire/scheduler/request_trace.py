"""The spans of a traced request at the scheduler: one for each phase, and events in between.

    scheduler                       from arrival to the end
      queue  prefill  decode        again after each preemption and loss, as a further attempt

The worker's spans are children of `scheduler`, too: they have its trace context.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pagewire.tracing.otel import OpenSpan


class RequestTrace:
    """Follows a request with one sequence. A beam search has only the outer span."""

    __slots__ = ("_attempt", "_leave_worker", "_phase", "_span")

    def __init__(self, span: "OpenSpan") -> None:
        self._span = span
        self._attempt = 1
        self._phase: OpenSpan | None = span.child("queue", attempt=1)
        self._leave_worker: Callable[[], None] | None = None

    @property
    def traceparent(self) -> str:
        """The context for spans of other processes."""
        return self._span.traceparent

    def admitted(self, worker: str, sequence: Sequence, leave: Callable[[], None]) -> None:
        """It starts on a worker; `leave` reports to the worker that it has left its slot."""
        if self._attempt > 1:
            self._span.event(
                "resumed", worker=worker, attempt=self._attempt, tokens=len(sequence.output)
            )
        known, cached = sequence.num_known, sequence.num_computed
        self._begin("prefill", worker=worker, tokens=known, cached_tokens=cached)
        self._leave_worker = leave

    def first_token(self) -> None:
        """The first token of this attempt has arrived."""
        self._begin("decode")

    def preempted(self) -> None:
        """It was preempted, and waits again."""
        self._span.event("preempted", attempt=self._attempt)
        self._wait_again()

    def lost(self, worker: str) -> None:
        """Its worker was lost."""
        self._leave_worker = None
        self._span.event("worker lost", worker=worker, attempt=self._attempt)
        self._wait_again()

    def failed(self, worker: str, reason: str) -> None:
        """Its step failed at a worker."""
        self._span.event("step failed", worker=worker, reason=reason, attempt=self._attempt)
        self._wait_again()

    def ended(self, state: State, finish: pb.Finish) -> None:
        """The request has ended here: completed, failed, aborted, or given back."""
        self._leave()
        if self._phase is not None:
            self._phase.end()
        usage = finish.usage
        self._span.set(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [pb.FinishReason.Name(finish.reason)],
                "pagewire.attempts": self._attempt,
                "pagewire.outcome": state.name.lower(),
            }
        )
        # Not the message: it may repeat what the client has sent.
        failed = finish.reason == pb.FINISH_REASON_ERROR
        self._span.end(f"error code {finish.error.code}" if failed else "")

    def _begin(self, phase: str, **attributes: str | int) -> None:
        if self._phase is not None:
            self._phase.end()
        self._phase = self._span.child(phase, attempt=self._attempt, **attributes)

    def _wait_again(self) -> None:
        self._leave()
        self._attempt += 1
        self._begin("queue")

    def _leave(self) -> None:
        if self._leave_worker is not None:
            self._leave_worker()
            self._leave_worker = None
