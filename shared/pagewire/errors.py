"""Errors that are reported to clients."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_MAX_MESSAGE_LENGTH = 1000
_MAX_FIELD_LENGTH = 200
_MAX_QUOTED = 60
MAX_QUOTED_NAME = 200  # for names of models and requests, which clients must recognize


class Code(IntEnum):
    """The gRPC status codes used here, by their wire numbers (google.rpc.Code)."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15


@dataclass(slots=True)
class RequestError(Exception):
    """One request is refused or has failed; the service continues.

    `message` names the field, the value and the remedy. `field` is the invalid field of the
    request, or empty. `retry_after` is the number of seconds after which to try again, if known.
    `reason` is for programs: unless empty, it is the error's `code` over HTTP.
    """

    code: Code
    message: str
    field: str = ""
    retry_after: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        # Messages quote the request, and a gRPC status must fit into headers.
        if len(self.message) > _MAX_MESSAGE_LENGTH:
            self.message = self.message[:_MAX_MESSAGE_LENGTH] + "..."
        if len(self.field) > _MAX_FIELD_LENGTH:
            self.field = self.field[:_MAX_FIELD_LENGTH] + "..."

    def __str__(self) -> str:
        return self.message

    def rename_field(self, name: str) -> None:
        """Gives the field another name, also at the beginning of the message."""
        if self.message.startswith((f"{self.field}: ", f"{self.field} ")):
            self.message = name + self.message.removeprefix(self.field)
        self.field = name

    def __reduce__(self) -> Any:
        # An exception is pickled with its positional arguments alone.
        return RequestError, (self.code, self.message, self.field, self.retry_after, self.reason)


def invalid(field: str, message: str) -> RequestError:
    """An INVALID_ARGUMENT error about one field."""
    return RequestError(Code.INVALID_ARGUMENT, message, field)


def deadline_passed(deadline_ms: int, generates: bool = True) -> RequestError:
    """The request has not ended in time. Without `generates`, it has no max_tokens."""
    less = " or lower max_tokens" if generates else ""
    return RequestError(
        Code.DEADLINE_EXCEEDED,
        f"the request did not end within its deadline_ms of {deadline_ms} ms; "
        f"give it more time{less}",
        "deadline_ms",
    )


def quoted(value: Any, most: int = _MAX_QUOTED) -> str:
    """A value for an error message, with at most `most` characters."""
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
