"""API keys at a gRPC server: which calls are accepted, and the limits of calls with a key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from pagewire.auth.accounts import Account, AccountedRequest
from pagewire.auth.callers import Callers
from pagewire.auth.costs import Cost
from pagewire.auth.keys import ApiKey, bearer
from pagewire.errors import Code, RequestError
from pagewire.rpc.credentials import Credentials
from pagewire.rpc.interceptors import Continuation, abort_with, refusing

# Load balancers ask for health without a key. Reflection describes a public protocol.
_OPEN_SERVICES = (f"/{health.SERVICE_NAME}/", f"/{reflection.SERVICE_NAME}/")


@dataclass(frozen=True, slots=True)
class KeyRules:
    """The kinds of a service's methods, by path, and the limits of calls with a key.

    `generating` methods count against all limits of a key, `counted` methods only against its
    requests a minute. `peers_only` methods cannot be called with a key. A call may take
    `message_seconds` to send its message, and `unread_seconds` to read a part of the answer.
    """

    generating: frozenset[str]
    counted: frozenset[str]
    peers_only: frozenset[str]
    max_calls: int
    max_message_bytes: int
    max_open_bytes: int
    message_seconds: float = 120.0
    unread_seconds: float = 60.0


@dataclass(slots=True)
class Caller:
    """A call with a key. The method that answers the call sets `used`, its number of tokens."""

    key: ApiKey
    request: AccountedRequest | None  # None for methods that do not count
    callers: Callers
    message_bytes: int = 0
    used: int = 0

    def admit(self, cost: Cost) -> None:
        """Reserves the cost of a prompt; RequestError if the key has too little left."""
        assert self.request is not None
        self.request.reserve(1, cost, self.callers.clock())


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller | None:
    """The call with a key that this task answers; None for peers, and on servers without keys."""
    return _CALLER.get()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Accepts peers without limits, and callers with a key within the limits of the key.

    A peer shows the token. On a server without a token, a peer is a client with a verified
    certificate and no key. A server with neither must listen on its own machine only; there,
    clients without a key may call the `peers_only` methods.
    """

    def __init__(self, callers: Callers, credentials: Credentials, rules: KeyRules) -> None:
        self._callers = callers
        self._credentials = credentials
        self._rules = rules
        self._calls = 0
        self._bytes = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of an accepted call, or a handler that refuses the call."""
        method = details.method
        shown = [value for name, value in details.invocation_metadata if name == "authorization"]
        if method.startswith(_OPEN_SERVICES) or self._is_peer(shown, method):
            return await continuation(details)
        account = self._callers.find(bearer(shown[0])) if len(shown) == 1 else None
        if account is None:
            what = "this API key is not valid" if shown else "the call has no API key"
            return refusing(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{what}; send one as metadata, `authorization: Bearer KEY`",
            )
        if method in self._rules.peers_only:
            return refusing(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{method} is for gateways, which show the scheduler's token; with an API key call "
                "the other methods",
            )
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return self._limited(handler, account, method)

    def _is_peer(self, shown: list[str], method: str) -> bool:
        if self._credentials.token is not None:
            return len(shown) == 1 and self._credentials.accepts(shown[0])
        verified = self._credentials.authenticates_clients
        return not shown and (verified or method in self._rules.peers_only)

    def _limited(self, handler: Any, account: Account, method: str) -> Any:
        """`handler` within the limits. The new handler reads the message itself, so that a call
        counts before its message arrives, and the message has a time limit. It does not keep the
        message; see `rpc.interceptors`."""

        async def stream(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with self._call(account, method, context) as caller:
                message = self._message(requests, handler, caller, context)
                async with aclosing(handler.unary_stream(await message, context)) as responses:
                    async for response in responses:
                        await self._write(response, context)

        async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._call(account, method, context) as caller:
                message = self._message(requests, handler, caller, context)
                return await handler.unary_unary(await message, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @asynccontextmanager
    async def _call(
        self, account: Account, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Caller]:
        rules, clock = self._rules, self._callers.clock
        caller = Caller(account.key, None, self._callers)
        try:
            if self._calls >= rules.max_calls:
                raise _too_many(f"{self._calls} calls are being answered already")
            if method in rules.generating or method in rules.counted:
                caller.request = account.begin_request(clock(), method in rules.generating)
        except RequestError as error:
            await abort_with(context, error)
        self._calls += 1
        _CALLER.set(caller)
        try:
            yield caller
        finally:
            self._calls -= 1
            self._bytes -= caller.message_bytes
            if caller.request is not None:
                caller.request.end(caller.used, clock())

    async def _message(
        self,
        requests: Any,
        handler: Any,
        caller: Caller,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        """The call's only message."""
        rules = self._rules
        try:
            try:
                # Closed at once. Otherwise it would keep the message as long as the call exists.
                async with (
                    asyncio.timeout(rules.message_seconds),
                    aclosing(aiter(requests)) as messages,
                ):
                    data = await anext(messages)
            except StopAsyncIteration:
                raise RequestError(Code.INVALID_ARGUMENT, "the call has no message") from None
            except TimeoutError:
                raise RequestError(
                    Code.DEADLINE_EXCEEDED,
                    f"the message took longer than {rules.message_seconds:g} s to arrive; "
                    "send it again",
                ) from None
            if len(data) > rules.max_message_bytes:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    f"the message is larger than {rules.max_message_bytes} bytes; send a shorter "
                    "prompt",
                )
            if self._bytes + len(data) > rules.max_open_bytes:
                raise _too_many(
                    f"the calls being answered have messages of {self._bytes} bytes already"
                )
        except RequestError as error:
            await abort_with(context, error)
        caller.message_bytes = len(data)
        self._bytes += len(data)
        return handler.request_deserializer(data)

    async def _write(self, response: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            async with asyncio.timeout(self._rules.unread_seconds):
                await context.write(response)
        except TimeoutError:
            # The status cannot be sent before the unread messages. The call ends here, so that its
            # memory is freed now.
            task = asyncio.create_task(_end_unread(context, self._rules.unread_seconds))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            raise asyncio.CancelledError from None


async def _end_unread(context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> None:
    with suppress(grpc.aio.AbortError):
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"nothing of the answer was read for {seconds:g} s; the call has ended",
        )


def _too_many(reason: str) -> RequestError:
    return RequestError(Code.RESOURCE_EXHAUSTED, f"{reason}; try again in 1 s", retry_after=1)
