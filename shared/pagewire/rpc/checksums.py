"""Checksums on the internal streams: a message that was damaged, lost or repeated is noticed.

A sealed message ends with its field `checksum`: the CRC-32 of all bytes in front of the value. It
starts with the number of the message in its direction of the stream, from 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from zlib import crc32

import grpc
from google.protobuf.message import DecodeError, Message
from prometheus_client import Counter

from pagewire.rpc.interceptors import Continuation
from pagewire.v1 import inference_pb2 as inference
from pagewire.v1 import worker_pb2 as worker

M = TypeVar("M")

CORRUPT_MESSAGES = Counter(
    "pagewire_corrupt_messages",
    "Messages without their checksum or with a wrong one, by kind; each has ended its stream.",
    ["kind"],
)

# `fixed32 checksum = 100` as it travels, without its value.
_TAG = b"\xa5\x06"
_SIZE = len(_TAG) + 4
# The CRC-32 of any bytes that end with their own CRC-32, whatever it starts with.
_RESIDUE = 0x2144DF1C


class StreamError(Exception):
    """A stream can no longer be trusted; another one has to be opened."""


class CorruptMessageError(StreamError):
    """A message whose checksum is missing or wrong."""


@dataclass(frozen=True, slots=True)
class SealedStream:
    """A method whose messages are sealed in both directions."""

    path: str
    request: type[Message]
    response: type[Message]


RUN = SealedStream("/pagewire.v1.Worker/Run", worker.RunRequest, worker.RunResponse)
MULTIPLEX = SealedStream(
    "/pagewire.v1.Inference/Multiplex", inference.MultiplexRequest, inference.MultiplexResponse
)


class Sealer(Generic[M]):
    """Serializes the messages of one direction of a stream, in their order."""

    __slots__ = ("_number", "_serialize")

    def __init__(self, serialize: Callable[[M], bytes]) -> None:
        self._serialize = serialize
        self._number = 0

    def seal(self, message: M) -> bytes:
        """A message as it travels."""
        data = self._serialize(message) + _TAG
        checksum = crc32(data, self._number)
        self._number += 1
        return data + checksum.to_bytes(4, "little")


class Opener(Generic[M]):
    """Reads the messages of one direction of a stream, in their order."""

    __slots__ = ("_kind", "_number", "_parse")

    def __init__(self, kind: str, parse: Callable[[bytes], M]) -> None:
        """`kind` names the messages in errors; `parse` makes one of bytes that are undamaged."""
        self._kind = kind
        self._parse = parse
        self._number = 0

    def open(self, data: bytes) -> M:
        """The message; CorruptMessageError, or what `parse` raises."""
        if crc32(data, self._number) != _RESIDUE:
            raise self._corrupt(data)
        self._number += 1
        return self._parse(data)

    def open_or_fault(self, data: bytes) -> M | StreamError:
        """The message, or what is wrong with it: a call would log what its deserializer raises,
        with a traceback, and read None instead."""
        # The same as `open`, written out: each step of each worker comes through here.
        if crc32(data, self._number) != _RESIDUE:
            return self._corrupt(data)
        self._number += 1
        try:
            return self._parse(data)
        except DecodeError as error:
            return StreamError(f"a message with the right checksum does not decode: {error}")

    def _corrupt(self, data: bytes) -> CorruptMessageError:
        """Says what was received without quoting it: it may hold a prompt."""
        CORRUPT_MESSAGES.labels(self._kind).inc()
        found = "no checksum"
        if data[-_SIZE:-4] == _TAG:
            stored = int.from_bytes(data[-4:], "little")
            found = f"checksum {stored:08x} instead of {crc32(data[:-4], self._number):08x}"
        return CorruptMessageError(
            f"{self._kind} number {self._number} of the stream, {len(data)} bytes, has {found}: it "
            "was damaged, or a message before it was lost; if the first message of every stream "
            "is refused, use processes of the same release"
        )


class SealGate(grpc.aio.ServerInterceptor):
    """Seals and opens the messages of the sealed streams of a server.

    Where a method reads its stream, it meets CorruptMessageError.
    """

    def __init__(self) -> None:
        self._streams = {stream.path: stream for stream in (RUN, MULTIPLEX)}

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, with a sealer and an opener for this one call."""
        handler = await continuation(details)
        stream = self._streams.get(details.method)
        if stream is None or handler is None or handler.request_deserializer is None:
            return handler
        return handler._replace(
            request_deserializer=Opener(stream.request.__name__, handler.request_deserializer).open,
            response_serializer=Sealer(handler.response_serializer).seal,
        )


def open_stream(
    channel: grpc.aio.Channel, stream: SealedStream, metadata: Any = None
) -> grpc.aio.StreamStreamCall[Any, Any]:
    """A call of a sealed stream; its messages are read by `receive`."""
    method = channel.stream_stream(
        stream.path,
        request_serializer=Sealer(stream.request.SerializeToString).seal,
        response_deserializer=Opener(
            stream.response.__name__, stream.response.FromString
        ).open_or_fault,
    )
    return method(metadata=metadata)


async def receive(call: grpc.aio.StreamStreamCall[Any, Any]) -> Any:
    """The call's next message, or grpc.aio.EOF; StreamError for one that is not sound.

    The call must then be ended.
    """
    message = await call.read()
    if isinstance(message, StreamError):
        raise message
    return message


def summary(message: Message) -> str:
    """What a log may say of a message: its kind, its size and its checksum, not what it holds."""
    data = message.SerializeToString()
    return f"{type(message).__name__} of {len(data)} bytes with CRC-32 {crc32(data):08x}"
