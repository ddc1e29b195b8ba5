"""One generation: a candidate of a prompt, from its first attempt to its end."""

import math
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewire.auth.costs import usage_of
from pagewire.errors import Code, RequestError, deadline_passed
from pagewire.gateway.generation.common_fields import NO_COMMON_FIELDS, CommonFields
from pagewire.gateway.generation.logprob_log import LogprobLog
from pagewire.gateway.generation.prompt_log import PromptLog
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.suspicion import Loss, Suspicion
from pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pagewire.tracing.otel import OpenSpan


class Generation:
    """The output of one candidate so far, and the data to continue it on another scheduler.

    `job` is the number that all generations of a job share, 0 for a single generation.
    `request` has the candidate's own fields, `common` those it shares with the other candidates of
    its prompt. `index` is its place in the job, `prompt_index` its prompt's place there.
    `arrived` is when its HTTP request arrived, by time.perf_counter(); now if None.
    `tokens` are all tokens received so far. Text waits here until `take_text`.
    `logprobs` belong to the same tokens; None if the request wants none.
    A generation that is not `eager` enters `updates` only when it has ended.
    `prompt` is what the answer contains of its prompt, None for nothing. Output follows the prompt.
    So the generation enters `updates` only after `prompt` has arrived, or if it fails.
    """

    __slots__ = (
        "_attempts",
        "_eager",
        "_held",
        "_reruns",
        "_text",
        "_tokens_at_loss",
        "_usage",
        "aborted",
        "common",
        "eager",
        "ended_at",
        "failure",
        "finish",
        "first_token_at",
        "handed_back_by",
        "has_waited_twice",
        "index",
        "job",
        "logprobs",
        "moved",
        "on_usage",
        "preemptions",
        "prompt",
        "prompt_index",
        "prompt_tokens",
        "queued",
        "refused_by",
        "request",
        "started_at",
        "suspicion",
        "tokens",
        "trace",
        "updates",
        "worker_losses",
    )

    def __init__(
        self,
        request: pb.GenerateRequest,
        index: int,
        prompt_index: int,
        updates: "UpdateQueue[Generation]",
        eager: bool,
        common: CommonFields = NO_COMMON_FIELDS,
        arrived: float | None = None,
        prompt: PromptLog | None = None,
        job: int = 0,
    ) -> None:
        self.request = request
        self.common = common
        self.index = index
        self.job = job
        self.prompt_index = prompt_index
        self.updates = updates
        self.queued = False  # whether it is in `updates` now
        self.prompt = prompt
        self._eager = eager
        self._held = prompt is not None and not prompt.arrived
        self.eager = eager and not self._held
        self.tokens = array("i")
        self._text = bytearray()
        self.logprobs = LogprobLog() if request.HasField("logprobs") else None
        self.prompt_tokens = 0
        self.finish: pb.Finish | None = None
        self.failure: RequestError | None = None
        self.aborted = False
        self.started_at = time.perf_counter() if arrived is None else arrived
        self.first_token_at = 0.0
        self.ended_at = 0.0
        self._attempts = 0
        # Reported by its schedulers: how often they ran it again, and preempted it.
        self._reruns = 0
        self.preemptions = 0
        self.moved = False  # it has lost its scheduler, or has waited for one
        self.has_waited_twice = False
        self.refused_by: set[str] = set()  # schedulers that had no room for it
        # Schedulers that had no worker for it, each with its `Link.capacity_changes` at that time.
        self.handed_back_by: dict[str, int] = {}
        self.suspicion = Suspicion()
        self._tokens_at_loss = 0
        # From the scheduler that handed it back: the workers lost with it, and the number of its
        # tokens at that time.
        self.worker_losses: tuple[pb.WorkerLosses, int] | None = None
        # Reported by its scheduler at its end, completed or not; then `on_usage` is called.
        self._usage: pb.Usage | None = None
        self.on_usage: Callable[[], None] | None = None
        # The span of its HTTP request; None if it is not traced.
        self.trace: OpenSpan | None = None
        if prompt is not None:
            if self._held:
                prompt.tell(self)
            else:
                self.prompt_arrived()

    @property
    def losses(self) -> int:
        """How many schedulers in a row were lost with it, without a new token in between."""
        return self.suspicion.losses if len(self.tokens) == self._tokens_at_loss else 0

    def trace_event(self, name: str, scheduler: str) -> None:
        """Adds an event of a scheduler to its trace, if it is traced."""
        if self.trace is not None:
            self.trace.event(
                name, scheduler=scheduler, generation=self.index, tokens=len(self.tokens)
            )

    def record_loss(self, loss: Loss) -> None:
        """Records that the scheduler that ran it is lost."""
        if len(self.tokens) != self._tokens_at_loss:
            self.suspicion.clear()
        self.suspicion.add_loss(loss)
        self._tokens_at_loss = len(self.tokens)

    def record_worker_losses(self, finish: pb.Finish) -> None:
        """Keeps the worker losses that a scheduler reports on handing it back, for the next one."""
        self._note_reruns(finish)
        losses = finish.worker_losses if finish.HasField("worker_losses") else None
        self.worker_losses = None if losses is None else (losses, len(self.tokens))

    def _note_reruns(self, finish: pb.Finish) -> None:
        self._reruns += finish.resumes
        self.preemptions += finish.preemptions

    @property
    def resumes(self) -> int:
        """How often it has continued on another scheduler or worker, as far as known: a scheduler
        reports its reruns at the end."""
        return max(0, self._attempts - 1) + self._reruns

    @property
    def model(self) -> str:
        """The name of the model that runs it."""
        return self.request.model

    @property
    def request_id(self) -> str:
        """Its name in logs."""
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether it was completed or has failed."""
        return self.finish is not None or self.failure is not None

    @property
    def usage_pending(self) -> bool:
        """Whether it was sent and then aborted, and its scheduler has not reported its usage."""
        return self._attempts > 0 and not self.ended and self._usage is None

    @property
    def usage_final(self) -> bool:
        """Whether no further usage report arrives: it was reported, or nothing was sent."""
        return self._attempts == 0 or self._usage is not None

    @property
    def used_prompt_tokens(self) -> int:
        """Prompt tokens computed for it or for its prompt's other candidates, as far as known."""
        reported = 0 if self._usage is None else self._usage.prompt_tokens
        return max(self.prompt_tokens, reported)

    @property
    def used_tokens(self) -> int:
        """Tokens generated for it, as far as known."""
        reported = 0 if self._usage is None else self._usage.completion_tokens
        return max(len(self.tokens), reported)

    def record_usage(self, finish: pb.Finish) -> None:
        """Keeps the usage that its scheduler reports; it counts for an aborted generation too."""
        self._usage = usage_of(finish)
        self._note_reruns(finish)
        if self.on_usage is not None:
            self.on_usage()

    def receive_prompt(self, message: pb.PromptOutput) -> None:
        """Stores the prompt data of the scheduler; RequestError if it is too large."""
        if self.prompt is not None and self._asks_for_prompt:
            self.prompt.receive(message)

    def prompt_arrived(self) -> None:
        """See PromptReader."""
        assert self.prompt is not None
        self._held, self.eager = False, self._eager
        if self.logprobs is not None and self.prompt.wishes.echo:
            self.logprobs.begin_at(len(self.prompt.text))
        if self.finish is not None or (self.eager and self._text):
            self.updates.put(self)

    @property
    def _asks_for_prompt(self) -> bool:
        """Whether this candidate asks its scheduler for the prompt data in the answer."""
        assert self.prompt is not None
        request = self.request
        if self.prompt.wishes.num_top is not None:
            return request.HasField("prompt_logprobs")
        return request.return_prompt_token_ids or request.prompt_text

    def extend(self, token_bytes: bytes, text: bytes, now: float) -> None:
        """Adds new tokens (little-endian int32) and new text (UTF-8)."""
        if token_bytes:
            if not self.tokens:
                self.first_token_at = now
            self.tokens.frombytes(token_bytes)
        self._text += text
        if self.eager and not self.queued:  # the queue checks it too; this saves a call
            self.updates.put(self)

    def take_text(self) -> str:
        """The text that has arrived since the last call."""
        text = self._text.decode(errors="replace")
        self._text.clear()
        return text

    def end(self, finish: pb.Finish) -> None:
        """Completes or fails it, as its scheduler reports."""
        self.record_usage(finish)
        if finish.reason == pb.FINISH_REASON_ERROR:
            self.fail(self._scheduler_error(finish.error))
        elif finish.reason == pb.FINISH_REASON_UNSPECIFIED:
            self.fail(RequestError(Code.INTERNAL, "the scheduler ended it without a reason"))
        elif self.logprobs is not None and self.logprobs.count != len(self.tokens):
            self.fail(RequestError(Code.INTERNAL, "the scheduler gave no log probabilities"))
        elif self._held and self._asks_for_prompt:
            self.fail(RequestError(Code.INTERNAL, "the scheduler sent nothing of the prompt"))
        else:
            if self.logprobs is not None:
                finish.cumulative_logprob = self.logprobs.total  # over all attempts
            self.finish = finish
            self._announce_end(self._held)

    def _scheduler_error(self, message: pb.Error) -> RequestError:
        error = _request_error(message)
        if error.code == Code.DEADLINE_EXCEEDED and error.field == "deadline_ms":
            # The scheduler names the time that was left when it received the request.
            return deadline_passed(self.request.deadline_ms, not self.request.HasField("pooling"))
        return error

    def fail(self, failure: RequestError) -> None:
        """Ends it with an error."""
        self.failure = failure
        self._announce_end()

    @property
    def seconds_left(self) -> float:
        """Seconds until its deadline; infinity without one."""
        if not self.request.HasField("deadline_ms"):
            return math.inf
        return self.started_at + self.request.deadline_ms / 1000 - time.perf_counter()

    def next_attempt(self) -> bytes:
        """The serialized request for a scheduler; a later attempt resumes after `tokens`.

        A later attempt has a new id, because a scheduler may not have noticed yet that the stream
        of the earlier one has broken.
        """
        self._attempts += 1
        request = self.request
        if self._attempts > 1 or request.HasField("deadline_ms"):
            request = pb.GenerateRequest()
            request.CopyFrom(self.request)
        if self._attempts > 1:
            request.request_id = f"{self.request.request_id}.{self._attempts}"
            request.resume_token_ids.extend(self.tokens)
            has_prompt = self.prompt is not None and self.prompt.arrived
            if has_prompt and not generates_nothing(request):
                request.ClearField("prompt_logprobs")
                request.ClearField("prompt_text")
                request.ClearField("return_prompt_token_ids")
        if request.HasField("deadline_ms"):
            request.deadline_ms = max(1, math.ceil(self.seconds_left * 1000))
        return request.SerializeToString() + self.common.data

    def _announce_end(self, held: bool = False) -> None:
        self.ended_at = time.perf_counter()
        if not held:
            self.updates.put(self)


def generates_nothing(request: pb.GenerateRequest) -> bool:
    """Whether a request asks only for prompt data."""
    return request.stop.HasField("max_tokens") and request.stop.max_tokens == 0


def _request_error(error: pb.Error) -> RequestError:
    known = error.code in Code._value2member_map_
    code = Code(error.code) if known else Code.INTERNAL
    retry_after = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else None
    message = error.message or "the scheduler gave no reason"
    return RequestError(code, message, error.field, retry_after, error.reason)
