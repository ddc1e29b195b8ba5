"""Interceptors of every gRPC server: for the token, and for messages that do not decode.

gRPC keeps the error of an aborted call with the call. The traceback of the error has the frames
that it passed, and these refer to the call. Only a garbage collection of the oldest generation
frees such a cycle, so no remaining frame may refer to a message (`without_frames`).
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from pagewire.errors import RequestError
from pagewire.rpc.credentials import Credentials

# Load balancers and orchestrators ask for health without a token.
_OPEN_SERVICE = f"/{health.SERVICE_NAME}/"
UNDECODABLE = (
    "the message is not valid protobuf of its type; generate the client again from the .proto files"
)

FIELD_TRAILER = "pagewire-error-field"
REASON_TRAILER = "pagewire-error-reason"

_STATUS = {status.value[0]: status for status in grpc.StatusCode}

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def without_frames(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """`error` without the frames that it has passed; the caller raises it again."""
    error.__context__ = None
    return error.with_traceback(None)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends a call with an error; trailers have the error's `retry_after`, field and reason."""
    trailers = []
    if error.retry_after is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(1000 * error.retry_after))))
    for name, value in ((FIELD_TRAILER, error.field), (REASON_TRAILER, error.reason)):
        if value and value.isascii() and value.isprintable():
            trailers.append((name, value))
    if trailers:
        context.set_trailing_metadata(tuple(trailers))
    await context.abort(_STATUS.get(error.code, grpc.StatusCode.INTERNAL), error.message)
    raise AssertionError("abort returned")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token before their first message is read."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call with the token, or one that refuses the call."""
        shown = [value for name, value in details.invocation_metadata if name == "authorization"]
        known = len(shown) == 1 and self._credentials.accepts(shown[0])
        if known or details.method.startswith(_OPEN_SERVICE):
            return await continuation(details)
        return refusing(
            grpc.StatusCode.UNAUTHENTICATED,
            "this server accepts calls with its token only; start both sides with the same token",
        )


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Answers a single request that does not decode with INVALID_ARGUMENT.

    gRPC itself would answer INTERNAL and log a traceback. Methods that read a stream of requests
    get DecodeError from the read instead.
    """

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler with a deserializer that returns errors instead of raising them."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        changed: dict[str, Any] = {
            "request_deserializer": _never_raising(handler.request_deserializer)
        }
        if handler.response_streaming:
            changed["unary_stream"] = _checked(handler.unary_stream)
        else:
            changed["unary_unary"] = _checked(handler.unary_unary)
        return handler._replace(**changed)


def refusing(status: grpc.StatusCode, message: str) -> Any:
    """A handler that ends any call with a status, before its first message is read."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(status, message)
        raise AssertionError("abort returned")

    # A unary handler would wait for the message first.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _never_raising(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error.with_traceback(None)  # its frame holds the data

    return decoded


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, called for decoded requests only."""
    if inspect.isasyncgenfunction(method):

        async def stream(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            try:
                await _check(request, context)
                async with aclosing(method(request, context)) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError as error:
                del request
                raise without_frames(error) from None

        return stream

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            await _check(request, context)
            return await method(request, context)
        except grpc.aio.AbortError as error:
            del request
            raise without_frames(error) from None

    return answer


async def _check(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNDECODABLE)
