"""Sampling parameters and stop conditions of a request, checked and with defaults resolved.

Gateways and schedulers both check them here, so HTTP and gRPC clients get the same messages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagewire.errors import invalid
from pagewire.limits import (
    INT32_MAX,
    MAX_BIASES,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled; see SamplingParams in inference.proto.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `repetition_penalty` 1 have no effect.
    `logit_bias` is by token id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise invalid("top_p", "top_p is 0; it must be above 0 and at most 1")
        if not 0 <= self.top_k <= INT32_MAX:
            raise invalid("top_k", f"top_k is {self.top_k}; it must be 0 (off) or positive")
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.repetition_penalty == 0.0:
            raise invalid(
                "repetition_penalty", "repetition_penalty is 0; it must be above 0 and at most 2"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise invalid(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASES} are allowed",
            )
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias.{token}", bias, -100.0, 100.0)

    @classmethod
    def from_proto(
        cls, message: pb.SamplingParams, defaults: "SamplingParams | None" = None
    ) -> "SamplingParams":
        """Checks a message, with `defaults` for absent fields; RequestError names the field."""
        given = {descriptor.name: value for descriptor, value in message.ListFields()}
        given["logit_bias"] = dict(message.logit_bias)
        return replace(defaults, **given) if defaults else cls(**given)


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When generation ends. `max_tokens` None means as many as the model's context allows."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise invalid("max_tokens", f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise invalid(
                "stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        if any(not text for text in self.stop):
            raise invalid("stop", "stop has an empty string; leave it out")
        if any(len(text) > MAX_STOP_STRING_LENGTH for text in self.stop):
            raise invalid(
                "stop", f"a stop string is longer than {MAX_STOP_STRING_LENGTH} characters"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(
                "stop_token_ids",
                f"stop_token_ids has {len(self.stop_token_ids)} ids; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed",
            )

    @classmethod
    def from_proto(cls, message: pb.StopConditions) -> "StopConditions":
        """Checks a message; RequestError names the field."""
        return cls(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            include_stop_str_in_output=message.include_stop_str_in_output,
        )


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid(field, f"{field} is {value}; it must be between {low:g} and {high:g}")
