"""Checksums: any damage to a message is detected, and ends only its stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from zlib import crc32

import grpc
import numpy as np
import pytest

from pagewire.packing import pack
from pagewire.rpc.checksums import (
    CORRUPT_MESSAGES,
    MULTIPLEX,
    RUN,
    ChecksumReader,
    ChecksumWriter,
    CorruptMessageError,
    StreamError,
    open_stream,
    receive,
    summary,
)
from pagewire.rpc.transport import bind, end_call, make_server, open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.v1 import worker_pb2_grpc
from support.waiting import eventually

MESSAGES = [
    worker_pb.RunRequest(hello=worker_pb.Hello(protocol_version=2, epoch=2**63)),
    worker_pb.RunRequest(step=worker_pb.Step(step=1, decode_slots=pack([0, 1, 2]))),
    worker_pb.RunResponse(result=worker_pb.StepResult(step=1, token_ids=pack([7, 8, 9]))),
    worker_pb.RunResponse(alive=worker_pb.Alive()),
    pb.MultiplexRequest(abort=1),
    pb.MultiplexRequest(submit=pb.Submit(stream=3, request=b"prompt", moved=True)),
    pb.MultiplexResponse(streams=pack([1]), token_ids=pack([5]), text=b"five"),
    pb.MultiplexResponse(),
]


def with_checksum(message: Any) -> bytes:
    return ChecksumWriter(type(message).SerializeToString).serialize(message)


def corrupt(kind: str) -> float:
    return CORRUPT_MESSAGES.labels(kind)._value.get()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_flipped_byte_is_found(message: Any) -> None:
    data = with_checksum(message)
    parse = type(message).FromString
    for place in range(len(data)):
        for flip in range(1, 256):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(CorruptMessageError):
                ChecksumReader("Message", parse).deserialize(bytes(damaged))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_that_is_cut_off_is_found(message: Any) -> None:
    data = with_checksum(message)
    for size in range(len(data)):
        with pytest.raises(CorruptMessageError):
            ChecksumReader("Message", type(message).FromString).deserialize(data[:size])
    with pytest.raises(CorruptMessageError):
        ChecksumReader("Message", type(message).FromString).deserialize(data + b"\x00")


def test_a_sealed_message_is_protobuf_that_ends_with_its_checksum() -> None:
    writer = ChecksumWriter(worker_pb.RunRequest.SerializeToString)
    reader = ChecksumReader("RunRequest", worker_pb.RunRequest.FromString)
    for number in range(300):
        message = worker_pb.RunRequest(step=worker_pb.Step(step=number))
        data = writer.serialize(message)
        read = worker_pb.RunRequest.FromString(data)
        assert read.checksum == crc32(data[:-4], number)
        assert data[-6:-4] == worker_pb.RunRequest(checksum=1).SerializeToString()[:-4]
        assert reader.deserialize(data) == read
        read.ClearField("checksum")
        assert read == message


def test_a_lost_message_and_one_that_comes_twice_are_found_with_the_next_one() -> None:
    writer = ChecksumWriter(worker_pb.RunRequest.SerializeToString)
    data = [writer.serialize(worker_pb.RunRequest()) for _ in range(3)]
    reader = ChecksumReader("RunRequest", worker_pb.RunRequest.FromString)
    reader.deserialize(data[0])
    for wrong in (data[2], data[0]):
        with pytest.raises(CorruptMessageError):
            reader.deserialize(wrong)


def test_what_was_received_is_told_and_not_quoted() -> None:
    before = corrupt("Submit")
    reader = ChecksumReader("Submit", pb.Submit.FromString)
    with pytest.raises(CorruptMessageError, match=r"Submit number 0 .* 12 bytes, has no checksum"):
        reader.deserialize(b"the prompt !")
    with pytest.raises(CorruptMessageError, match="checksum 00000000 instead of") as caught:
        reader.deserialize(ChecksumWriter(bytes).serialize(b"secret")[:-4] + bytes(4))
    assert "secret" not in str(caught.value)
    assert corrupt("Submit") == before + 2
    assert summary(pb.Submit(request=b"secret")).startswith("Submit of 8 bytes with CRC-32 ")


class Echo(worker_pb2_grpc.WorkerServicer):
    """Answers each request with the number of requests so far; damages messages for a test."""

    def __init__(self) -> None:
        self.faults: list[BaseException] = []

    async def Run(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        number = 0
        try:
            async for _ in requests:
                number += 1
                yield worker_pb.RunResponse(alive=worker_pb.Alive(received_steps=number))
        except StreamError as error:
            self.faults.append(error)
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, str]]:
    server, service = make_server(), Echo()
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    [port] = bind(server, ["127.0.0.1:0"])
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_streams_of_one_channel_count_alone(echo: tuple[Echo, str]) -> None:
    async with open_channel(echo[1]) as channel:
        calls = [open_stream(channel, RUN) for _ in range(3)]
        for number in range(1, 6):
            for call in calls:
                await call.write(worker_pb.RunRequest())
                assert (await receive(call)).alive.received_steps == number
        for call in calls:
            end_call(call)


async def test_a_damaged_request_ends_its_stream_with_data_loss(echo: tuple[Echo, str]) -> None:
    async with open_channel(echo[1]) as channel:
        call = channel.stream_stream(RUN.path)()
        await call.write(worker_pb.RunRequest().SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert len(echo[0].faults) == 1


async def test_a_damaged_response_raises_and_leaves_no_task_behind(
    echo: tuple[Echo, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serialize = ChecksumWriter.serialize

    def serialize_wrongly(self: ChecksumWriter[Any], message: Any) -> bytes:
        data = bytearray(serialize(self, message))
        if type(message) is worker_pb.RunResponse:
            data[0] ^= 1
        return bytes(data)

    monkeypatch.setattr(ChecksumWriter, "serialize", serialize_wrongly)
    async with open_channel(echo[1]) as channel:
        call = open_stream(channel, RUN)
        await call.write(worker_pb.RunRequest())
        with pytest.raises(CorruptMessageError, match="RunResponse number 0"):
            await receive(call)
        end_call(call)
    name = "_handle_status_once_received"
    await eventually(lambda: not [t for t in asyncio.all_tasks() if name in repr(t)])
    assert "Traceback" not in caplog.text


async def test_a_response_that_does_not_decode_is_no_sound_message() -> None:
    class Call:
        async def read(self) -> Any:
            reader = ChecksumReader("MultiplexResponse", MULTIPLEX.response.FromString)
            return reader.deserialize_or_error(ChecksumWriter(bytes).serialize(b"\xff"))

    with pytest.raises(StreamError, match="does not decode"):
        await receive(Call())


def test_random_bytes_are_never_taken_for_a_message() -> None:
    rng = np.random.default_rng(0)
    for size in range(200):
        with pytest.raises(CorruptMessageError):
            ChecksumReader("Message", bytes).deserialize(rng.bytes(size))
