"""Time limits of calls with a key: messages that do not arrive, answers that are not read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pagewire.auth.callers import Callers
from pagewire.auth.keys import new_key, read_keys
from pagewire.rpc.credentials import NO_CREDENTIALS
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
        # A client that reads on gets the status.
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
