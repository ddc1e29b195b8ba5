"""A client's request while it is open."""

import asyncio
from dataclasses import dataclass

from pagewire.errors import RequestError
from pagewire.limits import MAX_REQUEST_ID_LENGTH
from pagewire.scheduler.core.queue.job_admission import JobAdmission
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.request_trace import RequestTrace
from pagewire.scheduler.requests.beam_request import BeamRequest
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.prompt_output import AwaitedPrompt
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.v1 import inference_pb2 as pb


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client; its tokens are in its sequence or its beams."""

    request_id: str  # unique among the requests of its owner
    buffer: DeltaBuffer
    stream: int
    received: float
    arrival: int
    # It has run or waited elsewhere before: it may be queued where new requests are refused.
    moved: bool = False
    # The decision that it shares with other requests; None if it is alone.
    job: JobAdmission | None = None
    # Workers of another scheduler that were lost while they computed it.
    worker_losses: pb.WorkerLosses | None = None
    sequence: Sequence | None = None
    # A beam search; its sequences run in place of `sequence`.
    beams: BeamRequest | None = None
    text: TextStream | None = None
    # Prompt tokens that the first delta reports; 0 after it.
    unreported_prompt: int = 0
    include_stop_token: bool = False
    skip_special_tokens: bool = True
    # The prompt output that its client wants and has not received; None for nothing.
    awaited_prompt: AwaitedPrompt | None = None
    # False: it ends without a token, once the results of its prompt are complete.
    generates: bool = True
    # Numbers of an embedding; None for all.
    dimensions: int | None = None
    # From arrival to the first admission; None before that.
    queue_seconds: float | None = None
    # Sum over the delivered tokens, if the client wants log probabilities.
    cumulative_logprob: float = 0.0
    # The task that parses it; None before and after.
    parsing: asyncio.Task[None] | None = None
    # The timer that ends it; None without a deadline.
    deadline: asyncio.TimerHandle | None = None
    open: bool = True
    # Its spans; None if it is not traced.
    trace: RequestTrace | None = None
    # The name of its API key; empty for peers.
    owner: str = ""

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that wait or run for it, or have just ended."""
        if self.beams is not None:
            return self.beams.sequences
        return [] if self.sequence is None else [self.sequence]

    def end_after(self, token: int, stopped: bool, at_limit: bool) -> pb.Finish | None:
        """How the request ends after `token`; None if it continues."""
        text = self.text
        if text is not None and text.stop_string is not None:
            return pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=text.stop_string)
        if stopped:
            return pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=token)
        if at_limit:
            return pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        return None

    def flush(self, finish: pb.Finish) -> str:
        """The text that is held back at the end.

        A stop string in it replaces the token limit as the reason of `finish`.
        """
        if self.text is None:
            return ""
        rest = self.text.flush()
        if self.text.stop_string is not None and finish.reason == pb.FINISH_REASON_LENGTH:
            finish.reason = pb.FINISH_REASON_STOP
            finish.stop_string = self.text.stop_string
        return rest


def is_loggable(request_id: str) -> bool:
    """Whether an id of a client's choice may be in logs."""
    return len(request_id) <= MAX_REQUEST_ID_LENGTH and request_id.isprintable()


def error_finish(error: RequestError) -> pb.Finish:
    """The end of a request that failed or was refused."""
    detail = pb.Error(
        code=int(error.code), message=error.message, field=error.field, reason=error.reason
    )
    if error.retry_after is not None:
        detail.retry_after_ms = int(error.retry_after * 1000)
    return pb.Finish(reason=pb.FINISH_REASON_ERROR, error=detail)
