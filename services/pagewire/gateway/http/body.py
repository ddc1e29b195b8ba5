"""Reads request bodies up to a limit."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from pagewire.errors import quoted
from pagewire.gateway.errors import ApiError, ClientGoneError

# This many bytes of a body that is too large are read and dropped. Otherwise a client that still
# writes would get a connection reset instead of the error.
_DISCARDED_BYTES = 64 << 20
_BODY_SECONDS = 120.0


async def read_body(request: Request, limit: int) -> bytearray:
    """The JSON body. It is no copy: copying a large one would block the event loop.

    ApiError 400 for another content type or encoding, 413 above `limit` bytes, 408 if it takes
    minutes to arrive.
    """
    _check_content_type(request)
    length = request.headers.get("content-length", "")
    # The client waits before it writes the body, and reading would ask for the body.
    if "expect" in request.headers and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
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
        raise _too_large(limit)
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {limit} bytes; send a shorter prompt",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            400,
            f"the content type is {quoted(given)}; send `content-type: application/json`",
            code="unsupported_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            400,
            f"the content encoding is {quoted(encoding)}; send the body without compression",
            code="unsupported_content_encoding",
        )
