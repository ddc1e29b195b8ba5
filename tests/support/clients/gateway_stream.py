"""A gateway's stream to a scheduler, written and read by a test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from pagewire.packing import unpack, unpack_unsigned
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import Stack


@dataclass
class Gateway:
    """A gateway's end of the stream, and what it has received."""

    call: grpc.aio.StreamStreamCall
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, bytes] = field(default_factory=dict)
    finished: dict[int, pb.Finish] = field(default_factory=dict)
    reservation_changes: int = 0
    alone: bool = False

    async def submit(self, stream: int, message: pb.GenerateRequest, moved: bool = False) -> None:
        """Sends a request."""
        submit = pb.Submit(stream=stream, request=message.SerializeToString(), moved=moved)
        await self.call.write(pb.MultiplexRequest(submit=submit))

    async def reserve(self, wanted: bool = True) -> None:
        """Asks to use the scheduler alone; with `wanted` false, ends this."""
        await self.call.write(pb.MultiplexRequest(reserve=wanted))

    async def read(self) -> None:
        """Reads messages until it is cancelled."""
        async for news in self.call:
            ids, at, text_at = unpack(news.token_ids).tolist(), 0, 0
            streams = unpack_unsigned(news.streams).tolist()
            sizes = unpack_unsigned(news.text_sizes).tolist()
            counts = news.token_counts or [1] * len(streams)
            for stream, count, size in zip(streams, counts, sizes, strict=True):
                self.tokens.setdefault(stream, []).extend(ids[at : at + count])
                held = self.text.get(stream, b"")
                self.text[stream] = held + news.text[text_at : text_at + size]
                at, text_at = at + count, text_at + size
            self.finished |= {each.stream: each.finish for each in news.finished}
            self.reservation_changes, self.alone = news.reservation_changes, news.reserved


@contextlib.asynccontextmanager
async def gateway_streams() -> AsyncIterator[Callable[[Stack], Gateway]]:
    """Opens streams; they are read until the end of the block."""
    reading = []

    def connect_to(stack: Stack) -> Gateway:
        gateway = Gateway(stack.multiplex())
        reading.append((gateway, asyncio.create_task(gateway.read())))
        return gateway

    try:
        yield connect_to
    finally:
        for gateway, task in reading:
            task.cancel()
            gateway.call.cancel()
