"""The fields that all candidates of a prompt share, serialized once."""

from dataclasses import dataclass

from pagewire.auth.costs import estimate_prompt
from pagewire.gateway.affinity import prompt_head
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class CommonFields:
    """A serialized GenerateRequest without the fields in which candidates differ.

    Protobuf merges serialized messages that are concatenated: a scheduler gets a candidate's own
    fields followed by `data`. `data` may have megabytes, so it is never copied or parsed again.
    `head` (see affinity.py) and `tokens`, the estimated length of the prompt, are computed before.
    """

    data: bytes = b""
    head: bytes = b""
    tokens: int = 0

    @classmethod
    def of(
        cls, parameters: bytes, request: pb.GenerateRequest, cache_key: str | None = None
    ) -> "CommonFields":
        """`parameters` are serialized fields; `request` has model, cache salt and prompt.

        Requests of the same `cache_key` prefer the same scheduler.
        """
        return cls(
            parameters + request.SerializeToString(),
            prompt_head(request, cache_key),
            estimate_prompt(request),
        )


NO_COMMON_FIELDS = CommonFields()
