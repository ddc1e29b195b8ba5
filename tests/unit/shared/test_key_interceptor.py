"""Calls with a key: messages that do not arrive, answers that are not read, memory after errors."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pagewire.auth.callers import Callers
from pagewire.auth.keys import new_key, read_keys
from pagewire.errors import RequestError, invalid
from pagewire.rpc.credentials import NO_CREDENTIALS
from pagewire.rpc.interceptors import abort_with
from pagewire.rpc.key_interceptor import KeyInterceptor, KeyRules
from pagewire.rpc.transport import bind, make_server, open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.waiting import eventually

GENERATE = "/pagewire.v1.Inference/Generate"


class Endless(inference_pb2_grpc.InferenceServicer):
    """Writes without end."""

    def __init__(self) -> None:
        self.answering = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.answering += 1
        try:
            while True:
                yield pb.GenerateResponse(text="x" * 100_000)
        finally:
            self.answering -= 1


@asynccontextmanager
async def served(
    service: Endless, **seconds: float
) -> AsyncIterator[tuple[grpc.aio.Channel, tuple[tuple[str, str], ...], Callers]]:
    key = new_key()
    callers = Callers(lambda: read_keys(None, f"ada={key}"))
    rules = KeyRules(
        generating=frozenset({GENERATE}),
        counted=frozenset(),
        peers_only=frozenset(),
        max_calls=10,
        max_message_bytes=1000,
        max_open_bytes=1000,
        **seconds,
    )
    server = make_server(NO_CREDENTIALS, KeyInterceptor(callers, NO_CREDENTIALS, rules))
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    [port] = bind(server, ["127.0.0.1:0"])
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel, (("authorization", f"Bearer {key}"),), callers
    await server.stop(None)


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def account_of(callers: Callers, shown: tuple[tuple[str, str], ...]) -> Any:
    return callers.find(shown[0][1].removeprefix("Bearer ").encode())


async def test_an_answer_that_is_not_read_ends_its_call() -> None:
    service = Endless()
    async with served(service, unread_seconds=0.5) as (channel, shown, callers):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="a"), metadata=shown)
        await call.read()
        account = account_of(callers, shown)
        await eventually(lambda: account.open == service.answering == 0, 10)
        # A client that continues to read gets the status.
        with pytest.raises(grpc.aio.AioRpcError, match="nothing of the answer was read") as caught:
            await asyncio.wait_for(_read_on(call), 20)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_answer_that_is_read_slowly_goes_on() -> None:
    service = Endless()
    async with served(service, unread_seconds=2) as (channel, shown, _):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="a"), metadata=shown)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            assert len((await call.read()).text) == 100_000
            await asyncio.sleep(0.01)
        assert service.answering == 1
        call.cancel()
        await eventually(lambda: service.answering == 0)


async def test_a_message_that_takes_too_long_ends_its_call() -> None:
    service = Endless()
    async with served(service, message_seconds=0.3) as (channel, shown, callers):
        call = channel.stream_stream(GENERATE)(metadata=shown)
        with pytest.raises(grpc.aio.AioRpcError, match=r"took longer than 0\.3 s") as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert account_of(callers, shown).open == 0
        gone = channel.stream_stream(GENERATE)(metadata=shown)
        await eventually(lambda: account_of(callers, shown).open == 1)
        gone.cancel()
        await eventually(lambda: account_of(callers, shown).open == 0)
        large = channel.unary_stream(GENERATE)(b"x" * 1001, metadata=shown)
        with pytest.raises(grpc.aio.AioRpcError, match="larger than 1000 bytes"):
            await large.read()


class Message:
    """The type of a decoded request, in place of a large message."""


class Refusing(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            raise invalid("prompt", f"is {type(request).__name__}")
        except RequestError as error:
            await abort_with(context, error)
        yield pb.GenerateResponse()

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        await abort_with(context, invalid("text", f"is {type(request).__name__}"))


class Decoding(grpc.aio.ServerInterceptor):
    """Decodes requests to `Message`."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        return handler._replace(request_deserializer=lambda _: Message())


@pytest.mark.parametrize("keyed", [False, True], ids=["peer", "key"])
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_the_message_of_a_refused_call_is_freed_at_once(method: str, keyed: bool) -> None:
    """Without a garbage collection: messages of 16 MB once waited for one."""
    key = new_key()
    callers = Callers(lambda: read_keys(None, f"ada={key}"))
    rules = KeyRules(frozenset({GENERATE}), frozenset(), frozenset(), 10, 1000, 1000)
    access = KeyInterceptor(callers, NO_CREDENTIALS, rules) if keyed else None
    server = make_server(NO_CREDENTIALS, access, [Decoding()])
    inference_pb2_grpc.add_InferenceServicer_to_server(Refusing(), server)
    [port] = bind(server, ["127.0.0.1:0"])
    await server.start()
    gc.collect()
    gc.disable()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            kind: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
            for _ in range(3):
                call = kind(f"/pagewire.v1.Inference/{method}")(
                    b"", metadata=(("authorization", f"Bearer {key}"),) if keyed else ()
                )
                with pytest.raises(grpc.aio.AioRpcError, match="is Message"):
                    await (call.read() if method == "Generate" else call)
            await eventually(lambda: not [o for o in gc.get_objects() if type(o) is Message])
    finally:
        gc.enable()
        await server.stop(None)
