"""Calls that generate nothing, while schedulers are lost, full of suspects or missing."""

import asyncio

import pytest

from pagewire.errors import Code, RequestError
from pagewire.gateway.routing.schedulers import MAX_REQUEST_BYTES, Schedulers
from pagewire.v1 import inference_pb2 as pb
from support.scripted.routing import Connect
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler
from support.waiting import eventually

HI = pb.TokenizeRequest(text="Hi").SerializeToString()
ANSWER = pb.TokenizeResponse(token_ids=b"Hi")


async def tokenize(schedulers: Schedulers, request: bytes = HI) -> pb.TokenizeResponse:
    return pb.TokenizeResponse.FromString(await schedulers.call("Tokenize", MODEL, request))


async def test_a_call_needs_no_worker(connect: Connect, peers: list[ScriptedScheduler]) -> None:
    schedulers = await connect(await peers[0].start())
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    assert await tokenize(schedulers) == ANSWER


async def test_a_call_at_a_lost_scheduler_goes_to_another(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[1].waiting = 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].call_gate.clear()
    call = asyncio.create_task(tokenize(schedulers))
    await eventually(lambda: peers[0].calls == [HI])
    await peers[0].stop()
    assert await asyncio.wait_for(call, 5) == ANSWER
    assert peers[1].calls == [HI]


async def test_a_call_waits_for_the_only_scheduler_to_return(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    address = await peers[0].start()
    schedulers = await connect(address)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    call = asyncio.create_task(tokenize(schedulers))
    await asyncio.sleep(0.2)
    assert not call.done()
    await peers[0].start(address)
    assert await asyncio.wait_for(call, 5) == ANSWER


async def test_a_call_does_not_wait_forever(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.2)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    with pytest.raises(RequestError, match=r"for 0\.2 s; retry") as failed:
        await tokenize(schedulers)
    assert failed.value.code == Code.UNAVAILABLE


async def test_a_call_that_ends_each_scheduler_fails(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    peers[0].call_gate.clear()
    peers[0].reborn_after = 0.01
    call = asyncio.create_task(tokenize(schedulers))
    for attempt in range(1, 4):
        await eventually(lambda attempt=attempt: len(peers[0].calls) == attempt)
        await peers[0].die()
    with pytest.raises(RequestError) as failed:
        await asyncio.wait_for(call, 5)
    assert failed.value.code == Code.UNAVAILABLE


async def test_errors_of_the_scheduler_reach_the_caller(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    with pytest.raises(RequestError) as failed:
        await schedulers.call("Unheard", MODEL, HI)
    assert failed.value.code == Code.INTERNAL
    with pytest.raises(RequestError, match="split it") as refused:
        await tokenize(schedulers, bytes(MAX_REQUEST_BYTES + 1))
    assert refused.value.code == Code.INVALID_ARGUMENT
    assert not peers[0].calls


async def test_a_caller_that_leaves_cancels_its_call(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    peers[0].call_gate.clear()
    call = asyncio.create_task(tokenize(schedulers))
    await eventually(lambda: len(peers[0].calls) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.2)
    assert len(peers[0].calls) == 1
