"""Sampling parameters and stop conditions of a request, checked and with defaults resolved.

Gateways and schedulers both check them here, so HTTP and gRPC clients get the same messages.
"""

import math
from collections.abc import Mapping
from dataclasses import Field, InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from pagewire.errors import invalid
from pagewire.limits import (
    INT32_MAX,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

if TYPE_CHECKING:
    from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Number:
    """A sampling parameter that is one number, and its range."""

    name: str
    integer: bool
    low: float
    high: float
    # Whether `low` itself is outside the range.
    above_low: bool
    default: float
    # Whether the worker's slots have it in a tensor of its own, int32 or float32. The other
    # parameters are penalties, which only some sequences have.
    per_slot: bool

    def fault(self, value: float) -> str | None:
        """The reason why a value is refused; None if it is in the range."""
        if value == self.low and self.above_low:
            allowed = f"above {self.low:g} and at most {self.high:g}"
            return f"{self.name} is {self.low:g}; it must be {allowed}"
        if math.isfinite(value) and self.low <= value <= self.high:
            return None
        allowed = f"between {self.low:g} and {self.high:g}"
        if self.integer:
            allowed = f"between {self.low:.0f} (off) and {self.high:.0f}"
        return f"{self.name} is {value}; it must be {allowed}"


def _number(
    default: float, low: float, high: float, above_low: bool = False, per_slot: bool = True
) -> Any:
    return field(default=default, metadata={"range": (low, high, above_low), "per_slot": per_slot})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The sampling parameters that are one number each: ranges, and defaults without effect.

    This is their only declaration in Python. The gateway accepts these fields. Requests, sequences
    and slots inherit them, and both step codecs copy them by name. SamplingParams in
    inference.proto explains them, and SlotSampling in worker.proto has the same names.
    """

    temperature: float = _number(1.0, 0, 2)  # 0 is greedy
    top_k: int = _number(0, 0, INT32_MAX)
    top_p: float = _number(1.0, 0, 1, above_low=True)
    min_p: float = _number(0.0, 0, 1)
    presence_penalty: float = _number(0.0, -2, 2, per_slot=False)
    frequency_penalty: float = _number(0.0, -2, 2, per_slot=False)
    repetition_penalty: float = _number(1.0, 0, 2, above_low=True, per_slot=False)


def _specification(declared: Field[Any]) -> Number:
    low, high, above_low = declared.metadata["range"]
    return Number(
        name=declared.name,
        integer=declared.type is int,
        low=low,
        high=high,
        above_low=above_low,
        default=cast(float, declared.default),
        per_slot=declared.metadata["per_slot"],
    )


NUMBERS = tuple(map(_specification, fields(SamplingNumbers)))
SLOT_NUMBERS = tuple(number for number in NUMBERS if number.per_slot)


def numbers_of(holder: object) -> dict[str, Any]:
    """SamplingNumbers by name, of any object with these attributes, such as a message."""
    return {number.name: getattr(holder, number.name) for number in NUMBERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """How tokens are drawn; see SamplingParams of inference.proto. `logit_bias` is by token id."""

    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number in NUMBERS:
            fault = number.fault(getattr(self, number.name))
            if fault is not None:
                raise invalid(number.name, fault)
        if len(self.logit_bias) > MAX_BIASES:
            raise invalid(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASES} are allowed",
            )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                name = f"logit_bias.{token}"
                raise invalid(name, f"{name} is {bias}; it must be between -100 and 100")

        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise invalid(
                "allowed_token_ids",
                f"allowed_token_ids has {len(self.allowed_token_ids)} ids; at most "
                f"{MAX_ALLOWED_TOKENS} are allowed",
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise invalid(
                "bad_words",
                f"bad_words has {len(self.bad_words)} words; at most {MAX_BAD_WORDS} are allowed",
            )
        if not all(word.strip() and len(word) <= MAX_BAD_WORD_LENGTH for word in self.bad_words):
            raise invalid(
                "bad_words",
                f"bad_words has a word that is blank or longer than {MAX_BAD_WORD_LENGTH} "
                "characters",
            )

    @classmethod
    def from_proto(
        cls, message: "pb.SamplingParams", defaults: "SamplingParams | None" = None
    ) -> "SamplingParams":
        """Checks a message, with `defaults` for absent fields; RequestError names the field."""
        given = {descriptor.name: value for descriptor, value in message.ListFields()}
        given["logit_bias"] = dict(message.logit_bias)
        given["allowed_token_ids"] = tuple(message.allowed_token_ids)
        given["bad_words"] = tuple(message.bad_words)
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
    # Whether max_tokens may be 0, because the request asks for output about its prompt.
    may_be_empty: InitVar[bool] = False
    # The names of two fields in errors, for APIs with other names.
    max_tokens_name: InitVar[str] = "max_tokens"
    stop_name: InitVar[str] = "stop"

    def __post_init__(self, may_be_empty: bool, max_tokens_name: str, stop_name: str) -> None:
        least = 0 if may_be_empty else 1
        if self.max_tokens is not None and self.max_tokens < least:
            remedy = " without echo or prompt_logprobs" if self.max_tokens == 0 else ""
            raise invalid(
                max_tokens_name,
                f"{max_tokens_name} is {self.max_tokens}; it must be at least {least}{remedy}",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, above {max_tokens_name} {self.max_tokens}; "
                "lower it",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise invalid(
                stop_name,
                f"{stop_name} has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
            )
        if any(not text for text in self.stop):
            raise invalid(stop_name, f"{stop_name} has an empty string; leave it out")
        if any(len(text) > MAX_STOP_STRING_LENGTH for text in self.stop):
            raise invalid(
                stop_name,
                f"{stop_name} has a string of more than {MAX_STOP_STRING_LENGTH} characters; "
                "shorten it",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(
                "stop_token_ids",
                f"stop_token_ids has {len(self.stop_token_ids)} ids; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed",
            )

    @classmethod
    def from_proto(
        cls, message: "pb.StopConditions", may_be_empty: bool = False
    ) -> "StopConditions":
        """Checks a message; RequestError names the field."""
        return cls(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            include_stop_str_in_output=message.include_stop_str_in_output,
            may_be_empty=may_be_empty,
        )
