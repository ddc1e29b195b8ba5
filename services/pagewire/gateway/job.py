"""What a vocabulary makes of a request body."""

from dataclasses import dataclass

from pagewire.gateway.reply import Reply
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Job:
    """Requests for the schedulers, one a prompt, and how their output is written."""

    requests: list[pb.GenerateRequest]
    reply: Reply
    stream: bool
    include_usage: bool
