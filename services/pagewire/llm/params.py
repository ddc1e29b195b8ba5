"""Sampling parameters as a Python caller gives them."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from pagewire import sampling
from pagewire.errors import invalid
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.validation import validate_object

# Parameters that `pagewire.sampling` does not declare: the number and form of outputs, additional
# results, how the prompt is read, and how the request is scheduled. The API's request classes
# declare their types and ranges.
_OTHERS = (
    "n",
    "best_of",
    "logprobs",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "priority",
    "cache_salt",
    "deadline_ms",
)
NAMES = tuple(
    dict.fromkeys(
        [
            *(field.name for field in fields(sampling.SamplingParams)),
            *(field.name for field in fields(sampling.StopConditions)),
            *_OTHERS,
        ]
    )
)


class SamplingParams:
    """How outputs are drawn, and when they end: the fields of the HTTP API, by keyword.

    A parameter that is not given is None: the model's or the server's default applies. The
    constructor checks the parameters; RequestError names an unknown or invalid one.
    """

    __slots__ = ("_given",)
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in NAMES]
    )

    def __init__(self, **given: Any) -> None:
        for name in given:
            if name not in NAMES:
                raise invalid(name, f"{name} is not a sampling parameter{suggestion(name, NAMES)}")
        self._given = {name: value for name, value in given.items() if value is not None}
        checked = validate_object(CompletionRequest, {"prompt": "x", **self.fields()})
        with encodable_texts():
            checked.job("", 1)

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that were given, by name."""
        return dict(self._given)

    def replace(self, **changes: Any) -> "SamplingParams":
        """The same parameters with some changed; None removes one."""
        return SamplingParams(**{**self._given, **changes})

    def fields(self) -> dict[str, Any]:
        """The parameters as fields of a request to the completions API."""
        return {name: _json_form(value) for name, value in self._given.items()}

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return self._given.get(name)
        raise AttributeError(f"SamplingParams has no {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self._given == other._given

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={self._given[name]!r}" for name in sorted(self._given))
        return f"SamplingParams({given})"

    def __reduce__(self) -> Any:
        return _from_given, (self._given,)


@contextmanager
def encodable_texts() -> Iterator[None]:
    """Raises RequestError for a text with a surrogate, which no message can hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        found = f"{error.object[error.start]!r} at {error.start}"
        raise invalid(
            "", f"a text has {found}, half of a pair of surrogates, which UTF-8 cannot have"
        ) from error


def suggestion(name: str, known: Any) -> str:
    """The end of a message about an unknown name: the most similar known name, or all of them."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"


def _from_given(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**given)


def _json_form(value: Any) -> Any:
    """A value in JSON's types: lists for other sequences, and keys that are strings."""
    if isinstance(value, Mapping):
        return {str(key): _json_form(item) for key, item in value.items()}
    if isinstance(value, tuple | set | frozenset):
        return [_json_form(item) for item in value]
    return value
