"""Schedulers that share a worker: one holds it; the others receive its name and claim it later."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.rpc.checksums import RUN, open_stream, receive
from pagewire.rpc.protocol import PROTOCOL_VERSION
from pagewire.rpc.transport import open_channel
from pagewire.v1 import worker_pb2 as pb
from support.processes.simulated_workers import SimulatedWorkers, simulated_workers


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[SimulatedWorkers]:
    with simulated_workers(tmp_path) as worker:
        yield worker


class Visitor:
    """A scheduler's stream that shares the worker."""

    def __init__(self, name: str, channel: grpc.aio.Channel) -> None:
        self.name = name
        self.call = open_stream(channel, RUN)

    @classmethod
    async def come(cls, name: str, channel: grpc.aio.Channel, epoch: int = 1) -> "Visitor":
        visitor = cls(name, channel)
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION, epoch=epoch, scheduler=name, shares=True
        )
        await visitor.call.write(pb.RunRequest(hello=hello))
        return visitor

    async def claim(self) -> None:
        await self.call.write(pb.RunRequest(claim=pb.Claim()))

    async def next(self) -> Any:
        """The next message that is not a heartbeat."""
        while True:
            message = await asyncio.wait_for(receive(self.call), 20)
            if message is grpc.aio.EOF or not message.HasField("alive"):
                return message

    async def end(self) -> grpc.StatusCode:
        """The status with which the stream ends, after messages that are dropped."""
        try:
            while await self.next() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await self.call.code()

    async def until_ready(self) -> None:
        while not (await self.next()).HasField("ready"):
            pass

    async def until(self, holder: str, *waiting: str, claims: int = 0) -> None:
        """Waits until the worker reports this holder and these waiting schedulers."""
        want = pb.Standing(
            model="pagewire-chat", holder=holder, waiting=sorted(waiting), claims=claims
        )
        while (await self.next()).standing != want:
            pass


async def test_the_first_claim_wins_and_the_next_succeeds_when_the_holder_leaves(
    worker: SimulatedWorkers,
) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        first = await Visitor.come("first", channel, epoch=50)
        await first.until("", "first")
        second = await Visitor.come("second", channel)
        await second.until("", "first", "second")
        await first.claim()
        await first.until_ready()
        await second.claim()
        await second.until("first", "second", claims=1)
        third = await Visitor.come("third", channel)
        # The holder also receives the names of waiting schedulers.
        await first.until("first", "second", "third")
        first.call.cancel()
        await second.until("", "second", "third", claims=1)
        await second.claim()
        # The second has an older epoch than the first: among those that share, the claim decides.
        await second.until_ready()
        await third.until("second", "third")
        second.call.cancel()
        await third.until("", "third")


async def test_a_scheduler_takes_over_from_its_own_broken_stream_only(
    worker: SimulatedWorkers,
) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        broken = await Visitor.come("one", channel, epoch=5)
        await broken.claim()
        await broken.until_ready()
        older = await Visitor.come("one", channel, epoch=4)
        await older.claim()
        await older.until("one", claims=1)
        again = await Visitor.come("one", channel, epoch=6)
        await again.claim()
        await again.until_ready()
        assert await broken.end() is grpc.StatusCode.ABORTED


async def test_a_draining_worker_sends_those_that_wait_away(worker: SimulatedWorkers) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        holder = await Visitor.come("holder", channel)
        await holder.claim()
        await holder.until_ready()
        waiting = await Visitor.come("waiting", channel)
        await waiting.until("holder", "waiting")
        worker.process.terminate()
        assert await waiting.end() is grpc.StatusCode.UNAVAILABLE
        # The holder stays until it leaves, within the drain timeout.
        await holder.until("holder")
        await holder.call.done_writing()
        assert await asyncio.to_thread(worker.process.wait, 20) == 0


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_a_scheduler_that_shares_has_a_name(worker: SimulatedWorkers, name: str) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        visitor = await Visitor.come(name, channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await visitor.next()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1 to 256 characters" in (error.value.details() or "")


async def test_nothing_but_a_claim_may_come_before_ready(worker: SimulatedWorkers) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        visitor = await Visitor.come("early", channel)
        await visitor.until("", "early")
        await visitor.call.write(pb.RunRequest(step=pb.Step(step=1)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await visitor.next()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "must be a claim" in (error.value.details() or "")
        # It has left, and the worker is free for others.
        other = await Visitor.come("other", channel)
        await other.until("", "other")
        await other.claim()
        await other.until_ready()


async def test_a_scheduler_that_does_not_share_takes_the_worker_as_before(
    worker: SimulatedWorkers,
) -> None:
    async with open_channel(worker.addresses[0]) as channel:
        sharing = await Visitor.come("sharing", channel, epoch=3)
        await sharing.claim()
        await sharing.until_ready()
        alone = Visitor("alone", channel)
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=4)
        await alone.call.write(pb.RunRequest(hello=hello))
        await alone.until_ready()
        assert await sharing.end() is grpc.StatusCode.ABORTED
