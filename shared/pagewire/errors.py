"""Failures that a client is told about."""

from dataclasses import dataclass
from enum import IntEnum

_LONGEST_MESSAGE = 1000
_LONGEST_FIELD = 200


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
    """One request is refused or has failed; the service goes on.

    `message` is for people and names the field, the value and the remedy; `field` is the field of
    the request at fault, empty if none is. `retry_after` are the seconds after which to try again,
    where that is known.
    """

    code: Code
    message: str
    field: str = ""
    retry_after: float | None = None

    def __post_init__(self) -> None:
        # Messages quote what was sent; gRPC's statuses travel in headers, which are small.
        if len(self.message) > _LONGEST_MESSAGE:
            self.message = self.message[:_LONGEST_MESSAGE] + "..."
        if len(self.field) > _LONGEST_FIELD:
            self.field = self.field[:_LONGEST_FIELD] + "..."

    def __str__(self) -> str:
        return self.message


def invalid(field: str, message: str) -> RequestError:
    """An INVALID_ARGUMENT error about one field."""
    return RequestError(Code.INVALID_ARGUMENT, message, field)
