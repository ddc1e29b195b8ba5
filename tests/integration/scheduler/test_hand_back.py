"""A scheduler without workers: gateways get their requests back, other clients wait."""

import asyncio

import grpc
import pytest

from pagewire.errors import Code
from pagewire.scheduler import metrics
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import (
    Stack,
    collect,
    expected,
    request,
    worker_info,
)
from support.waiting import eventually


async def lose_all(stack: Stack) -> None:
    for worker in stack.workers:
        await worker.stop()
    await stack.wait_ready(0)


async def test_requests_without_a_worker_are_given_back_to_gateways(start, connect) -> None:
    """Running and waiting requests, and searches. Held-back text is not sent: the next scheduler
    sends it."""
    stack = await start(worker_info(num_slots=2), hand_back_after=0.5)
    stack.workers[0].step_seconds = 0.02
    gateway = connect(stack)
    full = stack.engine.tokenizer.decode(expected([5, 1], 100))
    for stream in range(1, 4):
        message = request([5, stream], 100)
        # Holds back a text that may become the stop string, which never occurs.
        message.stop.stop.append(full[5:60] + "\0")
        await gateway.submit(stream, message)
    search = request([9], 100, beam_search=pb.BeamSearch(width=3))
    await gateway.submit(9, search)
    await eventually(lambda: len(gateway.tokens.get(1, [])) > 10)
    before = metrics.HANDED_BACK._value.get()
    await lose_all(stack)
    began = asyncio.get_running_loop().time()
    assert gateway.finished == {}
    await eventually(lambda: len(gateway.finished) == 4)
    assert asyncio.get_running_loop().time() - began < 2
    assert metrics.HANDED_BACK._value.get() == before + 4
    for finish in gateway.finished.values():
        assert finish.error.code == Code.UNAVAILABLE
        assert "no ready worker for 0.5 s" in finish.error.message
        assert not finish.error.HasField("retry_after_ms")
    got = gateway.tokens[1]
    assert got == expected([5, 1], len(got))
    told = gateway.text[1].decode()
    assert len(told) < len(stack.engine.tokenizer.decode(got)), "held text was sent"
    assert stack.engine.num_open == 0
    late = request([7], 5)
    await gateway.submit(20, late)
    await eventually(lambda: 20 in gateway.finished)
    assert gateway.finished[20].error.code == Code.UNAVAILABLE


async def test_a_worker_that_returns_in_time_keeps_its_requests(start, connect) -> None:
    stack = await start(worker_info(), hand_back_after=5.0)
    stack.workers[0].step_seconds = 0.01
    gateway = connect(stack)
    await gateway.submit(1, request([5], 60))
    await eventually(lambda: len(gateway.tokens.get(1, [])) > 5)
    await lose_all(stack)
    await stack.workers[0].start(stack.addresses[0])
    await eventually(lambda: 1 in gateway.finished)
    assert gateway.finished[1].reason == pb.FINISH_REASON_LENGTH
    assert gateway.tokens[1] == expected([5], 60)
    await stack.settle()


async def test_a_client_without_a_gateway_waits_up_to_the_bound(start) -> None:
    stack = await start(worker_info(), hand_back_after=0.1, no_worker_timeout=1.0)
    stack.workers[0].step_seconds = 0.01
    awaited = asyncio.create_task(collect(stack.stub.Generate(request([5], 60))))
    await eventually(lambda: stack.workers[0].steps > 5)
    await lose_all(stack)
    outage = stack.engine._workers.outage
    await eventually(lambda: outage.longest_wait(moves=True) is not None)
    assert outage.longest_wait(moves=False) is None
    await stack.workers[0].start(stack.addresses[0])
    assert (await awaited)[0] == expected([5], 60)
    failed = asyncio.create_task(collect(stack.stub.Generate(request([6], 190))))
    await eventually(lambda: stack.engine.load().running == 1)
    await lose_all(stack)
    began = asyncio.get_running_loop().time()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await failed
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no ready worker for 1 s" in caught.value.details()
    assert asyncio.get_running_loop().time() - began > 0.5
    assert stack.engine.num_open == 0


async def test_requests_too_large_for_the_remaining_workers_are_given_back(start, connect) -> None:
    """Smaller ones stay, and requests that are too large for any worker are refused."""
    stack = await start(worker_info(), worker_info(num_blocks=12))
    for worker in stack.workers:
        worker.step_seconds = 0.01
    gateway = connect(stack)
    await gateway.submit(1, request([5], 150))
    await gateway.submit(2, request([6], 30))
    await eventually(lambda: len(gateway.tokens.get(1, [])) > 5)
    await stack.workers[0].stop()
    await eventually(lambda: len(gateway.finished) == 2)
    assert gateway.finished[1].error.code == Code.UNAVAILABLE
    assert "KV for 150 tokens" in gateway.finished[1].error.message
    assert gateway.finished[2].reason == pb.FINISH_REASON_LENGTH
    await gateway.submit(3, request([5], 150), moved=True)
    await gateway.submit(4, request([5], 300))
    await eventually(lambda: len(gateway.finished) == 4)
    assert gateway.finished[4].error.code == Code.INVALID_ARGUMENT


async def test_a_draining_worker_ends_its_requests_and_gets_no_more(start, connect) -> None:
    stack = await start(worker_info(num_slots=1), hand_back_after=0.3)
    stack.workers[0].step_seconds = 0.02
    gateway = connect(stack)
    await gateway.submit(1, request([5], 60))
    await eventually(lambda: len(gateway.tokens.get(1, [])) > 2)
    await gateway.submit(2, request([6], 60))
    await eventually(lambda: stack.engine.load().waiting == 1)
    [worker] = stack.engine._workers
    stack.engine.on_draining(worker.link)
    await eventually(lambda: 2 in gateway.finished)
    assert gateway.finished[2].error.code == Code.UNAVAILABLE
    await eventually(lambda: 1 in gateway.finished)
    assert gateway.finished[1].reason == pb.FINISH_REASON_LENGTH
    assert gateway.tokens[1] == expected([5], 60)
