"""A scheduler under more load than it can bear, and requests that may not take for ever."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from support.scheduler_stack import StartStack, collect, expected, request, stacks, worker_info
from support.waiting import eventually


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartStack]:
    async with stacks(tmp_path) as start_stack:
        yield start_stack


async def test_a_running_request_ends_at_its_deadline(start: StartStack) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.02
    began = asyncio.get_running_loop().time()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(request([3], 150, deadline_ms=300)))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "deadline_ms of 300 ms" in caught.value.details()
    assert 0.25 < asyncio.get_running_loop().time() - began < 2
    assert stack.workers[0].steps > 2
    await stack.settle()


async def test_a_waiting_request_ends_at_its_deadline(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1))
    stack.workers[0].step_seconds = 0.02
    running = asyncio.create_task(collect(stack.stub.Generate(request([3], 60))))
    await eventually(lambda: stack.engine.load().running == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(request([4], 2, deadline_ms=100)))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stack.engine.load().waiting == 0
    assert (await running)[0] == expected([3], 60)
    await stack.settle()


async def test_a_deadline_that_is_met_changes_nothing(start: StartStack) -> None:
    stack = await start(worker_info())
    tokens, _, _ = await collect(stack.stub.Generate(request([3], 10, deadline_ms=5000)))
    assert tokens == expected([3], 10)
    with pytest.raises(grpc.aio.AioRpcError, match="deadline_ms is 0"):
        await collect(stack.stub.Generate(request([3], 10, deadline_ms=0)))
    await stack.settle()


async def test_the_earliest_deadline_goes_first(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), policy="deadline")
    stack.workers[0].step_seconds = 0.005
    order: list[int] = []

    async def run(deadline_ms: int) -> None:
        await collect(stack.stub.Generate(request([3], 10, deadline_ms=deadline_ms)))
        order.append(deadline_ms)

    first = asyncio.create_task(run(30_000))
    await eventually(lambda: stack.engine.load().running == 1)
    late = asyncio.create_task(run(20_000))
    await eventually(lambda: stack.engine.load().waiting == 1)
    await asyncio.gather(first, late, run(10_000))
    assert order == [30_000, 10_000, 20_000]


async def test_a_tenant_with_many_requests_does_not_delay_another(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), policy="fair-share")
    stack.workers[0].step_seconds = 0.002
    order: list[str] = []

    async def run(tenant: str, number: int) -> None:
        await collect(stack.stub.Generate(request([number, 1], 10, tenant=tenant)))
        order.append(tenant)

    many = [asyncio.create_task(run("many", n)) for n in range(10)]
    await eventually(lambda: stack.engine.load().waiting == 9)
    await asyncio.gather(run("few", 99), *many)
    assert order.index("few") <= 2


async def test_a_client_that_leaves_the_queue_leaves_nothing(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1))
    stack.workers[0].step_seconds = 0.02
    running = asyncio.create_task(collect(stack.stub.Generate(request([3], 100))))
    await eventually(lambda: stack.engine.load().running == 1)
    call = stack.stub.Generate(request([4], 100))
    reader = asyncio.create_task(collect(call))
    await eventually(lambda: stack.engine.load().waiting == 1)
    steps = stack.workers[0].steps
    call.cancel()
    await eventually(lambda: stack.engine.load().waiting == 0)
    assert stack.workers[0].steps - steps <= 2
    assert stack.engine.num_open == 1
    with pytest.raises(asyncio.CancelledError):
        await reader
    running.cancel()
    await stack.settle()
