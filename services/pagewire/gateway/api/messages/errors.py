"""Errors as Anthropic's clients expect them, and which requests come from such clients."""

from typing import Any

from starlette.types import Scope

from pagewire.gateway.errors import ApiError

ROOT = "/v1/messages"
# Anthropic's API and OpenAI's share these paths; a header tells their clients apart.
_SHARED = "/v1/models"
_HEADER = b"anthropic-version"

# HTTP status: the type of the error. Others are `invalid_request_error` or `api_error`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Anthropic's status for a server that has no capacity now.
OVERLOADED = 529


def status_of(error: ApiError) -> int:
    """The HTTP status of an error."""
    return OVERLOADED if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error, which is also the data of an event `error`."""
    status = status_of(error)
    default = "api_error" if status >= 500 else "invalid_request_error"
    detail = {"type": _TYPES.get(status, default), "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API."""
    path = scope["path"]
    if _is_under(path, _SHARED):
        return any(name == _HEADER for name, _ in scope["headers"])
    return _is_under(path, ROOT)


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
