"""A client's request while it is open, and how it ends."""

import asyncio
from dataclasses import dataclass

from pagewire.errors import RequestError
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.requests.beam_request import BeamRequest
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.v1 import inference_pb2 as pb


@dataclass(slots=True, eq=False)
class Request:
    """What is known of one request besides its tokens."""

    request_id: str  # unique among those of its owner
    buffer: DeltaBuffer
    stream: int
    received: float
    arrival: int
    # It has run or waited elsewhere before: it may find room where new ones do not.
    moved: bool = False
    # Workers that may have been lost through it there.
    worker_losses: pb.WorkerLosses | None = None
    sequence: Sequence | None = None
    # Its own sequences run in place of `sequence`.
    beams: BeamRequest | None = None
    text: TextStream | None = None
    # Prompt tokens not yet reported to the client: the first delta carries their number.
    unreported_prompt: int = 0
    include_stop_token: bool = False
    # From arrival to the first admission; None before that.
    queue_seconds: float | None = None
    # Of the tokens delivered, if the client wants log probabilities.
    cumulative_logprob: float = 0.0
    # Reads it; None before and after that.
    parsing: asyncio.Task[None] | None = None
    # Ends it at its deadline; None without one.
    deadline: asyncio.TimerHandle | None = None
    open: bool = True
    # The API key's name, empty for peers.
    owner: str = ""

    @property
    def sequences(self) -> list[Sequence]:
        """What waits or runs for it, or has just ended."""
        if self.beams is not None:
            return self.beams.sequences
        return [] if self.sequence is None else [self.sequence]

    def end_after(self, token: int, stopped: bool, at_limit: bool) -> pb.Finish | None:
        """How the request ends after `token`; None if it goes on."""
        text = self.text
        if text is not None and text.stop_string is not None:
            return pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=text.stop_string)
        if stopped:
            return pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=token)
        if at_limit:
            return pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        return None


def error_finish(error: RequestError) -> pb.Finish:
    """The end of a request that failed or was refused."""
    detail = pb.Error(code=int(error.code), message=error.message, field=error.field)
    if error.retry_after is not None:
        detail.retry_after_ms = int(error.retry_after * 1000)
    return pb.Finish(reason=pb.FINISH_REASON_ERROR, error=detail)
