"""Checksums on the internal streams, which detect damaged, lost and repeated messages.

Each message ends with its field `checksum`, the CRC-32 of all bytes before the value. The CRC
starts with the number of the message in its direction of the stream, from 0. ISA-L computes the
CRC-32 of zlib 15 times faster: 0.7 us for a step of 512 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from isal.isal_zlib import crc32
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

# `fixed32 checksum = 100` in the wire format, without its value.
_TAG = b"\xa5\x06"
_SIZE = len(_TAG) + 4
# The CRC-32 of any bytes that end with their own CRC-32, for every start value.
_RESIDUE = 0x2144DF1C


class StreamError(Exception):
    """A stream is broken; the caller opens another one."""


class CorruptMessageError(StreamError):
    """A message whose checksum is missing or wrong."""


@dataclass(frozen=True, slots=True)
class ChecksummedStream:
    """A method whose messages have checksums in both directions."""

    path: str
    request: type[Message]
    response: type[Message]


RUN = ChecksummedStream("/pagewire.v1.Worker/Run", worker.RunRequest, worker.RunResponse)
MULTIPLEX = ChecksummedStream(
    "/pagewire.v1.Inference/Multiplex", inference.MultiplexRequest, inference.MultiplexResponse
)


class ChecksumWriter(Generic[M]):
    """Serializes the messages of one direction of a stream, in order, with checksums."""

    __slots__ = ("_number", "_serialize")

    def __init__(self, serialize: Callable[[M], bytes]) -> None:
        self._serialize = serialize
        self._number = 0

    def serialize(self, message: M) -> bytes:
        """The bytes of a message, its checksum included."""
        data = self._serialize(message)
        checksum = crc32(_TAG, crc32(data, self._number))
        self._number += 1
        return b"".join((data, _TAG, checksum.to_bytes(4, "little")))  # copies a large one once


class ChecksumReader(Generic[M]):
    """Checks and parses the messages of one direction of a stream, in order."""

    __slots__ = ("_kind", "_number", "_parse")

    def __init__(self, kind: str, parse: Callable[[bytes], M]) -> None:
        """`kind` names the messages in errors; `parse` decodes bytes with a right checksum."""
        self._kind = kind
        self._parse = parse
        self._number = 0

    def deserialize(self, data: bytes) -> M:
        """The message. Raises CorruptMessageError and the errors of `parse`."""
        if crc32(data, self._number) != _RESIDUE:
            raise self._corrupt(data)
        self._number += 1
        return self._parse(data)

    def deserialize_or_error(self, data: bytes) -> M | StreamError:
        """The message, or the error. If the deserializer raised, a client's call would log a
        traceback and return None."""
        # `deserialize` inlined, because every step of every worker runs this.
        if crc32(data, self._number) != _RESIDUE:
            return self._corrupt(data)
        self._number += 1
        try:
            return self._parse(data)
        except DecodeError as error:
            return StreamError(f"a message with the right checksum does not decode: {error}")

    def _corrupt(self, data: bytes) -> CorruptMessageError:
        """Describes the message without quoting it, as it may hold a prompt."""
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


class ChecksumInterceptor(grpc.aio.ServerInterceptor):
    """Adds and checks the checksums of a server's internal streams.

    A method that reads a damaged message from its stream gets CorruptMessageError.
    """

    def __init__(self) -> None:
        self._streams = {stream.path: stream for stream in (RUN, MULTIPLEX)}

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, with a writer and a reader for this call."""
        handler = await continuation(details)
        stream = self._streams.get(details.method)
        if stream is None or handler is None or handler.request_deserializer is None:
            return handler
        return handler._replace(
            request_deserializer=ChecksumReader(
                stream.request.__name__, handler.request_deserializer
            ).deserialize,
            response_serializer=ChecksumWriter(handler.response_serializer).serialize,
        )


def open_stream(
    channel: grpc.aio.Channel, stream: ChecksummedStream, metadata: Any = None
) -> grpc.aio.StreamStreamCall[Any, Any]:
    """A call of a stream with checksums; read its messages with `receive`."""
    method = channel.stream_stream(
        stream.path,
        request_serializer=ChecksumWriter(stream.request.SerializeToString).serialize,
        response_deserializer=ChecksumReader(
            stream.response.__name__, stream.response.FromString
        ).deserialize_or_error,
    )
    return method(metadata=metadata)


async def receive(call: grpc.aio.StreamStreamCall[Any, Any]) -> Any:
    """The call's next message, or grpc.aio.EOF; StreamError for a damaged one.

    After an error the caller must end the call.
    """
    message = await call.read()
    if isinstance(message, StreamError):
        raise message
    return message


def summary(message: Message) -> str:
    """A message for the log: its kind, size and checksum, but not its content."""
    data = message.SerializeToString()
    return f"{type(message).__name__} of {len(data)} bytes with CRC-32 {crc32(data):08x}"
