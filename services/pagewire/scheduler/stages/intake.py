"""Intake: from a request's arrival to the queue, with refusals, parsing and resumed tokens."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pagewire.config import SchedulerConfig
from pagewire.errors import Code, RequestError, deadline_passed, invalid
from pagewire.lifecycle.logs import set_request_id
from pagewire.packing import pack
from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.prompt_logprobs import PromptLogprobs
from pagewire.scheduler.core.queue.job_admission import JobAdmission
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.request_trace import RequestTrace
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.beam_request import begin_search, reserved_arrivals
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.incoming_request import IncomingRequest, takes_a_thread
from pagewire.scheduler.requests.open_request import Request, error_finish, is_loggable
from pagewire.scheduler.requests.parsing import (
    ParsedRequest,
    check_model,
    check_request_id,
    parse_request,
)
from pagewire.scheduler.requests.prompt import ModelLimits
from pagewire.scheduler.requests.prompt_output import check_prompt_size
from pagewire.scheduler.requests.queue_bounds import QueueBounds
from pagewire.scheduler.requests.reservations import Reservations
from pagewire.scheduler.requests.text_helper import TextHelpers
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.stages.pooling_requests import check_task, parse_pooling_request
from pagewire.scheduler.stages.prompts import Prompts
from pagewire.scheduler.structured.checked_grammars import CheckedGrammars
from pagewire.scheduler.structured.constraint import constraining_field
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorkers
from pagewire.suspicion import Suspicion
from pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing

log = logging.getLogger(__name__)

# Resumed tokens that are turned into text in one turn of the loop; some tokenizers take 10 us each.
REPLAYED_TOKENS = 512

# The policy `deadline` orders a request without a deadline as if it had this one.
USUAL_DEADLINE_MS = 60_000


class Intake:
    """Takes requests from clients and puts their sequences into the queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: str,
        tokenizer: Tokenizer | TokenIdsOnly,
        policy: SchedulingPolicy,
        admission: Admission,
        workers: ReadyWorkers,
        endings: Endings,
        prompts: Prompts,
        plan_soon: Callable[[], None],
    ) -> None:
        """`plan_soon` is called when a sequence was queued."""
        self.draining = False
        # Makes spans; None without tracing.
        self.tracing: Tracing | None = None
        self.reservations = Reservations(endings.give_all_back)
        self.helpers = TextHelpers(config)
        self.grammars = CheckedGrammars(config)
        self.bounds = QueueBounds(config, admission, endings.open)
        self._policy_name = config.policy
        self._policy = policy
        self._model = model
        self._tokenizer = tokenizer
        self._admission = admission
        self._workers = workers
        self._endings = endings
        self._open = endings.open
        self._prompts = prompts
        self._max_prompt_logprobs = config.max_prompt_logprobs
        self._plan_soon = plan_soon
        self._arrivals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        incoming: IncomingRequest,
        buffer: DeltaBuffer,
        stream: int,
        moved: bool = False,
        owner: str = "",
        worker_losses: pb.WorkerLosses | None = None,
        job: JobAdmission | None = None,
        parent: Mapping[str, str] | None = None,
    ) -> None:
        """Takes a request; its deltas and its end go to `buffer` under the number `stream`.

        `moved`: it has run or waited elsewhere before; `worker_losses` are the workers lost there
        while they ran it. A request without an id gets one. `owner` is the name of the API key
        whose ids it shares; it is empty for all peers. `job` has the decision that it shares with
        other requests. `parent` is the W3C context of its client's span, empty for a client without
        one; None: no trace.
        """
        message = incoming.message
        self._arrivals += 1
        message.request_id = message.request_id or f"request-{uuid.uuid4().hex}"
        # Peers only: tokens to resume from must not be a way around the bounds of the queue.
        moved = moved or (incoming.resumes and not owner)
        received = time.monotonic()
        request = Request(message.request_id, buffer, stream, received, self._arrivals, moved)
        request.owner = owner
        request.worker_losses = worker_losses
        request.job = job
        if self.tracing is not None and parent is not None:
            request.trace = self._begin_trace(self.tracing, parent, request)
        self._arrivals += reserved_arrivals(message.beam_search.width)
        if self.reservations.is_for(buffer):
            self._endings.give_all_back()  # a reservation runs one request at a time
        refusal = self._refusal(request)
        if refusal is not None:
            metrics.REQUESTS.labels(State.FAILED.name.lower()).inc()
            finish = error_finish(refusal)
            if request.trace is not None:
                request.trace.ended(State.FAILED, finish)
            buffer.add_finish(stream, finish, 0)
            return
        self._open.add(request)
        loop = asyncio.get_running_loop()
        if ms := message.deadline_ms:
            late = deadline_passed(ms, not message.HasField("pooling"))
            request.deadline = loop.call_later(ms / 1000, self._endings.fail, request, late)
        task = loop.create_task(self._parse_and_queue(incoming, request))
        self._open.begin_parsing(request, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_trace(
        self, tracing: "Tracing", parent: Mapping[str, str], request: Request
    ) -> RequestTrace | None:
        attributes: dict[str, str] = {"gen_ai.request.model": self._model}
        if is_loggable(request.request_id):
            attributes["pagewire.request_id"] = request.request_id
        span = tracing.serve("scheduler", parent, attributes)
        return None if span is None else RequestTrace(span)

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Queues sequences for admission."""
        for sequence in sequences:
            self._admission.waiting.push(sequence)
        self._plan_soon()

    def is_alone(self, buffer: DeltaBuffer) -> bool:
        """Whether the scheduler is reserved for a gateway and no other client has open requests."""
        return self.reservations.is_for(buffer) and self._open.are_all_of(buffer)

    def _refusal(self, request: Request) -> RequestError | None:
        if self.draining:
            return failures.draining()
        if self.reservations.excludes(request.buffer):
            return failures.reserved()
        conflict = self._open.conflict(request)
        if conflict is not None:
            return conflict
        decide = partial(self.bounds.refusal, request.moved, tokens=0)
        return decide() if request.job is None else request.job.refusal(request.moved, decide)

    async def _parse_and_queue(self, incoming: IncomingRequest, request: Request) -> None:
        try:
            parsed = await self._parse(incoming)
        except RequestError as error:
            self._open.end_parsing(request)
            if request.open:
                self._close_failed(request, error)
            return
        self._open.end_parsing(request)
        try:
            if request.open:
                await self._queue(request, parsed)
        except Exception:
            log.exception("request %s could not be queued", request.request_id)
            self._close_failed(request, failures.queueing_failed())

    async def _parse(self, incoming: IncomingRequest) -> ParsedRequest:
        """Checks and tokenizes: short texts at once, longer ones in a thread or a process."""
        message = incoming.message
        check_request_id(message.request_id)
        set_request_id(message.request_id)
        check_model(message.model, self._model)
        if message.priority and not self._policy.uses_priority:
            raise invalid(
                "priority",
                f"priority is {message.priority}, but this server admits by "
                f"{self._policy_name}; leave it out or start with --policy priority",
            )
        try:
            limits = self._limits()
            check_task(message, limits.pooling, self._model)
            pools = message.HasField("pooling")
            grammar = "" if pools else await self._grammar(message, limits)
            tokens = None
            if incoming.data is not None:
                tokens = await self.helpers.tokens(incoming.data, limits)
            elif takes_a_thread(message):
                tokens = await self.helpers.tokens_of(message, self._tokenizer, limits)
            if pools:
                return parse_pooling_request(message, self._tokenizer, limits, tokens)
            parsed = parse_request(message, self._tokenizer, limits, tokens, grammar)
            num_top = parsed.prompt_logprobs
            check_prompt_size(len(parsed.tokens.prompt), num_top, self._max_prompt_logprobs)
            return parsed
        except RequestError:
            raise
        except Exception as error:
            log.exception("request %s could not be parsed", message.request_id)
            raise failures.parsing_failed() from error

    async def _grammar(self, message: pb.GenerateRequest, limits: ModelLimits) -> str:
        """The grammar of a request's structured output; empty if it has none.

        RequestError if a worker accepts no constraints and the request has one.
        """
        field = constraining_field(message)
        if field and not limits.constraints:
            raise invalid(
                field,
                f"{field}: a worker of this model takes no constraints: it is simulated or an "
                "external program, it was started with --no-structured-output, or the model has no "
                "tokenizer for grammars (the worker's log says why); remove it",
            )
        if not message.HasField("structured_output"):
            return ""
        return await self.grammars.grammar(message.structured_output)

    async def _queue(self, request: Request, parsed: ParsedRequest) -> None:
        pooling = self._limits().pooling
        sequence = new_sequence(request, parsed, pooling is not None and pooling.whole_prompt)
        if (losses := request.worker_losses) is not None:
            suspicion = Suspicion.from_report(losses.workers, list(losses.alone), time.monotonic())
            self._admission.set_suspicion(sequence, suspicion)
        if parsed.return_prompt and not parsed.wants_prompt:
            ids = pack(parsed.tokens.prompt)
            request.buffer.add_prompt(pb.PromptOutput(stream=request.stream, token_ids=ids))
        ended = await _replay(request, parsed)
        if not request.open:
            return
        if parsed.wants_prompt:
            vocab_size = self._limits().vocab_size
            try:
                await self._prompts.prepare(request, parsed, ended, self.helpers, vocab_size)
            except RequestError as error:
                if request.open:
                    self._close_failed(request, error)
            if not request.open:
                return
        elif ended is not None:
            self._endings.close(request, State.COMPLETED, ended)
            return
        # Other requests of its job may wait by now.
        alone = request.job is None
        full = self.bounds.refusal(request.moved, sequence.num_sent) if alone else None
        if full is not None:
            self._close_failed(request, full)
            return
        if not request.moved and not self._workers.may_take(sequence):
            self._close_failed(request, failures.too_large(sequence))
            return
        if parsed.beam_search is not None:
            beams = begin_search(parsed.beam_search, sequence, self._limits().vocab_size)
            self._open.begin_search(request, beams)
        elif request.trace is not None:
            sequence.traceparent = request.trace.traceparent
        self.enqueue(request.sequences)

    def _close_failed(self, request: Request, error: RequestError) -> None:
        self._endings.close(request, State.FAILED, error_finish(error))

    def _limits(self) -> ModelLimits:
        limits = self._workers.limits
        if limits is None:
            raise RequestError(Code.UNAVAILABLE, "no worker is ready yet; try again later")
        return limits


def new_sequence(request: Request, parsed: ParsedRequest, whole_prompt: bool = False) -> Sequence:
    """Creates the sequence of a request, with the resumed tokens as output.

    `whole_prompt`: the model pools, and computes every token of a prompt for that.
    """
    sequence = Sequence(
        prompt=parsed.tokens.prompt,
        sampling=parsed.sampling,
        # A request that generates nothing still computes its prompt. It ends before its token is
        # taken.
        max_tokens=max(1, parsed.max_tokens),
        stop_ids=parsed.stop_ids,
        arrival=request.arrival,
        priority=parsed.priority,
        cache_salt=parsed.cache_salt,
        tenant=parsed.tenant,
        # In milliseconds of the monotonic clock.
        deadline=int(request.received * 1000) + (parsed.deadline_ms or USUAL_DEADLINE_MS),
        prompt_logprobs=(
            None
            if parsed.prompt_logprobs is None
            else PromptLogprobs(parsed.prompt_logprobs, len(parsed.tokens.prompt))
        ),
        prediction=parsed.tokens.prediction,
        owner=request,
    )
    if parsed.pooling is not None:
        sequence.pools, sequence.whole_prompt = True, whole_prompt
        if parsed.pooling.HasField("dimensions"):
            request.dimensions = parsed.pooling.dimensions
    sequence.output.frombytes(parsed.tokens.resumed.tobytes())
    request.sequence = sequence
    request.text = parsed.text
    request.include_stop_token = parsed.include_stop_token
    request.skip_special_tokens = parsed.skip_special_tokens
    request.generates = parsed.max_tokens > 0
    request.unreported_prompt = len(parsed.tokens.prompt)
    return sequence


async def _replay(request: Request, parsed: ParsedRequest) -> pb.Finish | None:
    """Feeds the resumed tokens to the text stream; returns the end of a request that they end."""
    resumed = parsed.tokens.resumed.tolist()
    if not resumed:
        return None
    stopped = resumed[-1] in parsed.stop_ids and len(resumed) > parsed.sampling.min_tokens
    if request.text is not None:
        fed = resumed[: -1 if stopped else None]
        for at in range(0, len(fed), REPLAYED_TOKENS):
            for token in fed[at : at + REPLAYED_TOKENS]:
                request.text.feed(token)
            await asyncio.sleep(0)
    return request.end_after(resumed[-1], stopped, len(resumed) >= parsed.max_tokens)
