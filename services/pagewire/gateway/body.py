"""Request bodies: read up to a limit, then parsed and checked by a model in one pass."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from pagewire.errors import RequestError, invalid
from pagewire.gateway.errors import ApiError, ClientGoneError

Model = TypeVar("Model", bound=BaseModel)

# What is read and thrown away of a body that is too large, so that the client gets to see the
# answer instead of a connection reset while it still writes.
_DISCARDED_BYTES = 64 << 20
_SHOWN_CHARACTERS = 60
_BODY_SECONDS = 120.0


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON body; ApiError 400 for another content type, 413 above `limit` bytes, 408 when it
    takes minutes to arrive."""
    _check_content_type(request)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                if len(body) <= limit:
                    body += chunk
                    excess = len(body) - limit
                else:
                    excess += len(chunk)
                if excess > _DISCARDED_BYTES:
                    break
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the request body took longer than {_BODY_SECONDS:g} s to arrive; send it again",
            code="request_timeout",
            headers={"connection": "close"},
        ) from error
    if len(body) > limit:
        raise ApiError(
            413,
            f"the request body is larger than {limit} bytes; send a shorter prompt",
            code="request_too_large",
            headers={"connection": "close"},
        )
    return bytes(body)


def parse(model: type[Model], body: bytes) -> Model:
    """`body` as a `model`; RequestError names the first field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _first_fault(error) from None


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            400,
            f"the content type is {given!r}; send `content-type: application/json`",
            code="unsupported_content_type",
        )


def _first_fault(error: ValidationError) -> RequestError:
    fault = error.errors(include_url=False, include_context=False)[0]
    kind, message = fault["type"], fault["msg"]
    if kind == "json_invalid":
        return invalid("", f"the request body is not JSON in UTF-8: {message}")
    if kind == "model_type" and not fault["loc"]:
        return invalid("", "the request body is not a JSON object")
    param = path(fault["loc"])
    if kind == "missing":
        return invalid(param, f"{param} is required")
    return invalid(param, f"{param} is {_shown(fault['input'])}: {message}")


def path(location: Sequence[int | str]) -> str:
    """`messages[0].content` for ("messages", 0, "content"); `<...>` tags of unions are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
