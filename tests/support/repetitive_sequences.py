"""Sequences that say the same things again, drawn in every way, for tests of drafts."""

from typing import Any

from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from support.models.constrained_sequences import constrained
from support.models.step_driver import Sequence

LENGTH = 80
LIKELY = [40, 41, 44, 49]


def repetitive(seed: int, period: int = 7) -> list[int]:
    """A prompt that says the same thing over and over."""
    return [40 + (seed * 31 + i * i) % 900 for i in range(period)] * 6


def sampling(**fields: Any) -> pb.SlotSampling:
    """Few tokens are likely, so that drafts are right and wrong."""
    return pb.SlotSampling(
        **({"top_p": 1.0} | fields), bias_ids=pack(LIKELY), biases=pack_floats([14.0] * len(LIKELY))
    )


def sequences() -> list[Sequence]:
    """Every way of drawing tokens, and prompts of several lengths."""
    ways = [
        sampling(),
        sampling(logprobs=3),
        sampling(temperature=0.7, seed=1),
        sampling(temperature=0.3, seed=2, logprobs=0),
        sampling(temperature=0.9, seed=3, top_k=3, min_p=0.1, top_p=0.9),
        sampling(temperature=0.2, seed=4, presence_penalty=0.3, frequency_penalty=0.05),
        sampling(repetition_penalty=1.05, logprobs=2),
        sampling(min_tokens=30, stop_token_ids=[40, 41, 2]),
    ]
    made = [
        Sequence(repetitive(i, 5 + 3 * i), LENGTH - i, sampling=way) for i, way in enumerate(ways)
    ]
    return [*made, constrained(1), constrained(2, presence_penalty=0.1)]
