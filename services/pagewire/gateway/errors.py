"""Failures as HTTP answers: OpenAI's error bodies and statuses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from pagewire.errors import Code, RequestError

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_GONE_STATUS = 499  # counted only: there is nobody left to read it
RETRY_AFTER = {"retry-after": "1"}
# OpenAI's clients repeat what ends with 5xx unless told otherwise; a deadline that has passed has
# passed for the repetition too.
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

# Fields of the gRPC request whose name differs over HTTP.
_PARAMS = {
    "prompt_token_ids": "prompt",
    "chat": "messages",
    "template_kwargs": "chat_template_kwargs",
    "width": "best_of",
    "num_returned": "n",
}


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


@dataclass(slots=True)
class ApiError(Exception):
    """A request that ends with an error body. `param` is the JSON field at fault."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, error: RequestError) -> "ApiError":
        """The HTTP view of an error that gateway and scheduler share."""
        status, kind, code = _KINDS.get(error.code, _INTERNAL)
        param = _PARAMS.get(error.field, error.field) or None
        headers = {429: RETRY_AFTER, 503: RETRY_AFTER, 504: NO_RETRY}.get(status)
        if error.retry_after is not None:
            headers = {"retry-after": str(math.ceil(error.retry_after))}
        return cls(status, error.message, kind, param, code, headers)

    def body(self) -> dict[str, Any]:
        """`{"error": ...}` as OpenAI writes it."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)
