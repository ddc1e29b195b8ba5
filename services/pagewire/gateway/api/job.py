"""What a vocabulary makes of a request body."""

from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.gateway.api.formatting import Reply
from pagewire.gateway.generation.input import Input
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Job:
    """Requests for the schedulers and how their output is written.

    `requests` has `candidates` in a row for each prompt, of which `n` become choices. They are
    small: what the candidates of a prompt have in common is in `inputs`, once for each prompt.
    """

    requests: list[pb.GenerateRequest]
    inputs: list[Input]
    candidates: int
    n: int
    reply: Reply
    stream: bool
    include_usage: bool
    shows_logprobs: bool

    def input_of(self, index: int) -> Input:
        """That of the request at `index`."""
        return self.inputs[index // self.candidates]


def candidates(prompts: Iterable[pb.GenerateRequest], n: int) -> list[pb.GenerateRequest]:
    """`n` requests for each prompt, the seed of each one above that of the one before.

    Every candidate is a request of its own, so each can go on elsewhere when its scheduler is
    lost, and candidate i is what the prompt alone gives with `seed + i`.
    """
    made = []
    for prompt in prompts:
        for i in range(n):
            request = pb.GenerateRequest()
            request.CopyFrom(prompt)
            request.sampling.seed = _wrapped(prompt.sampling.seed + i)
            if n > 1:
                request.request_id += f"-{i}"
            made.append(request)
    return made


def _wrapped(seed: int) -> int:
    """Modulo 2^64 into the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63
