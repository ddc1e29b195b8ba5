"""What all candidates of a prompt have in common, serialized once."""

from dataclasses import dataclass

from pagewire.auth.costs import estimate_prompt
from pagewire.gateway.affinity import head
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Input:
    """A serialized GenerateRequest without what differs between candidates.

    Serialized messages that follow one another are one message: a scheduler gets a candidate's
    own fields and `data` behind them. `data` may have megabytes, which are never copied or read
    again: `head` (see affinity.py) and `tokens`, an estimate of the prompt's, were taken from it.
    """

    data: bytes = b""
    head: bytes = b""
    tokens: int = 0

    @classmethod
    def of(cls, common: bytes, request: pb.GenerateRequest) -> "Input":
        """The fields in `common`, and a request that has model, salt and input."""
        return cls(common + request.SerializeToString(), head(request), estimate_prompt(request))


NO_INPUT = Input()
