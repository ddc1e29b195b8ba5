"""The gRPC stream to one scheduler, opened again whenever it breaks."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from pagewire.errors import Code, RequestError, invalid
from pagewire.lifecycle.stall_detector import StallDetector
from pagewire.rpc.checksums import MULTIPLEX, StreamError, open_stream, receive
from pagewire.rpc.credentials import Credentials
from pagewire.rpc.interceptors import FIELD_TRAILER, REASON_TRAILER
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, SILENT_HEARTBEATS
from pagewire.rpc.transport import end_call, open_channel, was_cancelled
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

FIRST_BACK_OFF = 0.1  # seconds, doubled by each failure
LAST_BACK_OFF = 0.5
_LARGE_BYTES = 1 << 20  # of a message; writing it takes milliseconds
_SERVICE = "/pagewire.v1.Inference/"

# Makes a message when it is sent, as requests may be large; None sends nothing.
MakeMessage = Callable[[], pb.MultiplexRequest | None]


class MessageHandler(Protocol):
    """Handles the messages of a connection."""

    def received(self, response: pb.MultiplexResponse) -> None:
        """Handles a message. An exception ends the stream."""

    def stream_ended(self, reason: str) -> bool:
        """Called when a stream has ended. Returns whether the scheduler had answered on it."""
        ...


class Connection:
    """Sends queued messages over one stream at a time; replaces a stream that ends or stalls."""

    def __init__(self, target: str, handler: MessageHandler, credentials: Credentials) -> None:
        self._target = target
        self._handler = handler
        self._credentials = credentials
        self._outbox: deque[MakeMessage] = deque()
        self._outbox_filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None  # while a stream is open
        self._num_received = 0
        self._num_sent = 0  # on the present stream
        self._silent = False
        self._unread = StallDetector(SILENT_HEARTBEATS)
        self._unread_checked_at = 0.0

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.create_task(self._run(), name=f"link {self._target}")

    async def close(self) -> None:
        """Ends the stream for good, without a call of `stream_ended`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, make_message: MakeMessage) -> None:
        """Queues a message for the present stream; it is dropped if the stream ends first."""
        self._outbox.append(make_message)
        self._outbox_filled.set()

    async def call(self, method: str, request: bytes) -> bytes:
        """Calls a unary method of the scheduler, with serialized messages.

        RequestError; UNAVAILABLE if there is no connection, or if it ends before the answer.
        """
        if self._channel is None:
            raise RequestError(Code.UNAVAILABLE, f"scheduler {self._target} is not connected")
        call: Any = self._channel.unary_unary(_SERVICE + method)
        try:
            return bytes(await call(request, metadata=self._credentials.metadata))
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from error
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            # gRPC also raises this when the channel is closed, as it is when the stream ends.
            raise RequestError(Code.UNAVAILABLE, f"scheduler {self._target} was lost") from None

    def check_read(self, num_read: int) -> None:
        """Compares the messages read by the scheduler with those sent; called at each load report.

        StreamError if the scheduler has stopped reading, which its heartbeats do not show.
        """
        now = asyncio.get_running_loop().time()
        if now - self._unread_checked_at < 0.9 * HEARTBEAT_SECONDS:
            return
        self._unread_checked_at = now
        if self._unread.poll(num_read, self._num_sent > num_read):
            raise StreamError(f"it has read {num_read} of {self._num_sent} messages")

    async def _run(self) -> None:
        back_off = FIRST_BACK_OFF
        while True:
            reason = "the scheduler closed the stream"
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                # gRPC also raises this when the other side cancels the call.
                reason = "the scheduler cancelled the stream"
                if self._silent:
                    reason = f"no message for {SILENT_HEARTBEATS * HEARTBEAT_SECONDS:g} s"
            except StreamError as error:
                reason = str(error)
            except Exception:
                reason = "a message could not be handled"
                log.exception("scheduler %s: %s", self._target, reason)
            if was_cancelled():  # gRPC may turn our cancellation into another error
                return
            self._outbox.clear()
            if self._handler.stream_ended(reason):
                back_off = FIRST_BACK_OFF
            await asyncio.sleep(back_off * random.uniform(0.5, 1.0))
            back_off = min(2 * back_off, LAST_BACK_OFF)

    async def _run_stream(self) -> None:
        self._silent = False
        # A new channel for each attempt, so that gRPC's own back-off is not added to ours.
        async with open_channel(self._target, self._credentials) as channel:
            call = open_stream(channel, MULTIPLEX, self._credentials.metadata)
            self._channel = channel
            self._num_sent = 0
            self._unread = StallDetector(SILENT_HEARTBEATS)
            tasks = [
                asyncio.create_task(self._send_outbox(call)),
                asyncio.create_task(self._cancel_when_silent(call)),
            ]
            try:
                while (response := await receive(call)) is not grpc.aio.EOF:
                    self._num_received += 1
                    self._handler.received(response)
            finally:
                self._channel = None
                for task in tasks:
                    task.cancel()
                end_call(call)
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_outbox(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            while self._outbox:
                message = self._outbox.popleft()()
                if message is not None:
                    self._num_sent += 1
                    if message.ByteSize() > _LARGE_BYTES:
                        await asyncio.sleep(0)  # making it took as long: others have a turn
                    await call.write(message)
            self._outbox_filled.clear()
            await self._outbox_filled.wait()

    async def _cancel_when_silent(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Cancels a stream on which no message arrives, not even heartbeats."""
        stall = StallDetector(SILENT_HEARTBEATS)
        while not stall.poll(self._num_received):  # noqa: ASYNC110 - it polls for silence
            await asyncio.sleep(HEARTBEAT_SECONDS)
        self._silent = True
        call.cancel()


def _call_error(error: grpc.aio.AioRpcError) -> RequestError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: a gateway's calls have no limits
        return invalid("", f"the answer is too large: {details}; send a shorter text")
    number = code.value[0]
    known = number in Code._value2member_map_
    trailers = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
    return RequestError(
        Code(number) if known else Code.INTERNAL,
        details or code.name,
        trailers.get(FIELD_TRAILER, ""),
        reason=trailers.get(REASON_TRAILER, ""),
    )
