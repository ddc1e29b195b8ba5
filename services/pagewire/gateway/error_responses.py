"""Answers to requests that have failed."""

from starlette.responses import JSONResponse
from starlette.types import Scope

from pagewire.gateway.api.messages.errors import error_body, is_anthropic, status_of
from pagewire.gateway.errors import ApiError
from pagewire.gateway.request_ids import answered_id


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The answer to a request that has failed, in the form of the API that it belongs to."""
    if is_anthropic(scope):
        body = error_body(error, answered_id(scope.setdefault("state", {})))
        return JSONResponse(body, status_of(error), headers=error.headers)
    return error.response()
