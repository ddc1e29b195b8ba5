"""Errors as HTTP answers: OpenAI's error bodies and statuses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from pagewire.errors import Code, RequestError

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_GONE_STATUS = 499  # appears in metrics only: the client has left
RETRY_AFTER = {"retry-after": "1"}
# Marks a refused request that another gateway may serve: Envoy sends it there.
DRAINING_HEADER = "x-pagewire-draining"
# OpenAI's clients retry a 5xx unless told otherwise. Do not retry a 504: the deadline has passed.
NO_RETRY = {"x-should-retry": "false"}

# gRPC code: HTTP status, OpenAI type, OpenAI code.
_KINDS: dict[int, tuple[int, str, str | None]] = {
    Code.INVALID_ARGUMENT: (400, INVALID, None),
    Code.FAILED_PRECONDITION: (400, INVALID, None),
    Code.NOT_FOUND: (404, INVALID, "model_not_found"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Code.UNAVAILABLE: (503, SERVER, "service_unavailable"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}
_INTERNAL = (500, SERVER, "internal_error")

# gRPC fields that have another name over HTTP.
_PARAMS = {
    "prompt_token_ids": "prompt",
    "prompt_text": "echo",
    "chat": "messages",
    "template_kwargs": "chat_template_kwargs",
    "width": "best_of",
    "num_returned": "n",
}


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def aborted() -> RequestError:
    """The error of a request that was aborted by its id, for answers without a finish reason."""
    return RequestError(Code.CANCELLED, "the request was aborted")


@dataclass(slots=True)
class ApiError(Exception):
    """An error that an HTTP client gets. `param` is the JSON field that caused it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, error: RequestError) -> "ApiError":
        """The HTTP form of an error that gateway and scheduler share."""
        status, kind, code = _KINDS.get(error.code, _INTERNAL)
        param = _PARAMS.get(error.field, error.field) or None
        headers = {429: RETRY_AFTER, 503: RETRY_AFTER, 504: NO_RETRY}.get(status)
        if error.retry_after is not None:
            headers = {"retry-after": str(math.ceil(error.retry_after))}
        return cls(status, error.message, kind, param, error.reason or code, headers)

    def body(self) -> dict[str, Any]:
        """`{"error": ...}` in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP answer: status, headers and body."""
        return JSONResponse(self.body(), self.status, headers=self.headers)
