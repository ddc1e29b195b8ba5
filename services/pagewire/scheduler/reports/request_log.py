"""The line of a request at a scheduler: of a gRPC client at info; of a gateway, which writes a line
of its own, at debug."""

import logging
import time

from pagewire.lifecycle.logs import fields
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.requests.open_request import Request, is_loggable
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)


def log_end(request: Request, state: State, finish: pb.Finish) -> None:
    """Writes how a request has ended: its tokens and times, never its text."""
    level = logging.DEBUG if request.buffer.moves else logging.INFO
    if not log.isEnabledFor(level):
        return
    values = {
        "outcome": state.name.lower(),
        "duration": round(time.monotonic() - request.received, 4),
        "queue": round(request.queue_seconds or 0.0, 4),
        "prompt_tokens": finish.usage.prompt_tokens,
        "tokens": finish.usage.completion_tokens,
        "resumes": finish.resumes,
        "preemptions": finish.preemptions,
    }
    text = " ".join(f"{name}={value}" for name, value in values.items())
    name = request.request_id if is_loggable(request.request_id) else "without a valid id"
    log.log(level, "request %s ended: %s", name, text, extra=fields(request_id=name, **values))
