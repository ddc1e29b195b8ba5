"""A scheduler under overload: bounds of the queue, deadlines, slow readers."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pagewire.scheduler.requests import delivery, queue_bounds
from pagewire.scheduler.requests.incoming_request import IncomingRequest
from pagewire.scheduler.service import InferenceService
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import (
    Stack,
    StartStack,
    collect,
    expected,
    request,
    worker_info,
)
from support.waiting import eventually


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


async def test_a_request_within_its_deadline_ends_as_usual(start: StartStack) -> None:
    stack = await start(worker_info())
    tokens, _, _ = await collect(stack.stub.Generate(request([3], 10, deadline_ms=5000)))
    assert tokens == expected([3], 10)
    with pytest.raises(grpc.aio.AioRpcError, match="deadline_ms is 0"):
        await collect(stack.stub.Generate(request([3], 10, deadline_ms=0)))
    await stack.settle()


def _counts(stack: Stack) -> tuple[int, int]:
    load = stack.engine.load()
    return load.running, load.waiting


async def test_the_earliest_deadline_goes_first(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), policy="deadline")
    stack.workers[0].step_seconds = 0.03
    order: list[int | None] = []

    async def run(deadline_ms: int | None) -> None:
        await collect(stack.stub.Generate(request([3], 10, deadline_ms=deadline_ms)))
        order.append(deadline_ms)

    runs = []
    for waiting, deadline_ms in enumerate((30_000, None, 90_000, 20_000)):
        runs.append(asyncio.create_task(run(deadline_ms)))
        await eventually(lambda n=waiting: _counts(stack) == (1, n))
    await asyncio.gather(*runs, run(10_000))
    assert order == [30_000, 10_000, 20_000, None, 90_000]


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


async def test_a_waiting_request_that_is_cancelled_is_removed(start: StartStack) -> None:
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


async def test_a_full_queue_says_when_to_try_again(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_requests=2)
    stack.workers[0].step_seconds = 0.01
    calls = [asyncio.create_task(collect(stack.stub.Generate(request([n], 20)))) for n in range(9)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
    assert len(refused) >= 6
    assert {r.code() for r in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    for error in refused:
        pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
        assert 1000 <= int(pushback) <= 60_000
    await stack.settle()


async def test_the_wait_for_admission_is_bounded(start: StartStack) -> None:
    """Ten requests a second can be served, and forty arrive: each waits briefly or is refused."""
    stack = await start(worker_info(num_slots=1), max_waiting_seconds=0.5)
    stack.workers[0].step_seconds = 0.01
    waits: list[float] = []
    pushbacks: list[int] = []

    async def run(number: int) -> None:
        buffer = delivery.DeltaBuffer()
        arrival = IncomingRequest.of(request([number % 90 + 1], 10))
        stack.engine.intake.submit(arrival, buffer, 0)
        finished: list[pb.StreamFinish] = []
        while not finished:
            await buffer.ready.wait()
            finished = list(buffer.take().finished)
        if finished[0].finish.reason == pb.FINISH_REASON_ERROR:
            assert finished[0].finish.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            pushbacks.append(finished[0].finish.error.retry_after_ms)
        else:
            waits.append(finished[0].finish.queue_seconds)

    runs = []
    for number in range(160):
        runs.append(asyncio.create_task(run(number)))
        await asyncio.sleep(0.025)
    await asyncio.gather(*runs)
    assert len(waits) + len(pushbacks) == 160
    assert len(waits) > 20, "the worker is kept busy"
    assert len(pushbacks) > 60
    assert max(waits) < 1.5, sorted(waits)[-10:]
    assert 1000 <= min(pushbacks) <= max(pushbacks) <= 2000
    await stack.settle()


async def test_a_burst_is_not_refused_for_its_wait(start: StartStack) -> None:
    """A burst waits for room in steps, not for slots, which became free slowly before."""
    stack = await start(worker_info(num_slots=8, budget=16), max_waiting_seconds=0.8)
    stack.workers[0].step_seconds = 0.02
    slow = [asyncio.create_task(collect(stack.stub.Generate(request([n], 60)))) for n in range(12)]
    await asyncio.gather(*slow)
    for _ in range(3):
        burst = [collect(stack.stub.Generate(request([n] * 16, 2))) for n in range(8)]
        for number, (tokens, _, _) in enumerate(await asyncio.gather(*burst)):
            assert tokens == expected([number] * 16, 2)
    await stack.settle()


async def test_a_job_is_refused_by_what_others_have_waiting(start: StartStack) -> None:
    """A job of nine on a queue for two; then two more jobs, of which no request is queued."""
    stack = await start(worker_info(num_slots=1), max_waiting_requests=2, max_waiting_tokens=8)
    stack.workers[0].step_seconds = 0.01
    call = stack.multiplex()
    streams = {number: 1 + number // 9 for number in range(9 * 3)}
    for stream, job in streams.items():
        message = request([stream + 1] * 6, 2).SerializeToString()
        submit = pb.Submit(stream=stream, request=message, job=job)
        await call.write(pb.MultiplexRequest(submit=submit))
    ends: dict[int, pb.Finish] = {}
    while len(ends) < len(streams):
        ends |= {ended.stream: ended.finish for ended in (await call.read()).finished}
    reasons = {number: set() for number in (1, 2, 3)}
    for stream, finish in ends.items():
        reasons[streams[stream]].add((finish.reason, finish.error.code))
    full = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert reasons[1] == {(pb.FINISH_REASON_LENGTH, 0)}
    assert reasons[2] == reasons[3] == {(pb.FINISH_REASON_ERROR, full)}
    call.cancel()
    await stack.settle()


async def test_load_says_that_new_requests_are_refused(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_requests=2)
    stack.workers[0].step_seconds = 0.01
    assert stack.engine.load().retry_after_seconds == 0
    calls = []
    for number in range(3):
        calls.append(asyncio.create_task(collect(stack.stub.Generate(request([number], 30)))))
        await eventually(lambda n=number: _counts(stack) == (1, n))
    assert (await stack.stub.GetLoad(pb.GetLoadRequest())).retry_after_seconds >= 1
    with pytest.raises(grpc.aio.AioRpcError, match="2 requests are waiting already"):
        await collect(stack.stub.Generate(request([9], 5)))
    await asyncio.gather(*calls)
    assert stack.engine.load().retry_after_seconds == 0
    await stack.settle()


async def test_a_moved_request_is_not_refused_for_its_wait(start: StartStack) -> None:
    """It waited at a scheduler that was lost, so it has no tokens to resume from."""
    stack = await start(worker_info(num_slots=1), max_waiting_seconds=0.01)
    stack.workers[0].step_seconds = 0.01
    running = asyncio.create_task(collect(stack.stub.Generate(request([1], 60))))
    await eventually(lambda: _counts(stack) == (1, 0))
    waiting = asyncio.create_task(collect(stack.stub.Generate(request([2], 5))))
    await eventually(lambda: stack.engine.load().retry_after_seconds > 0)
    calls = []
    for stream, moved in enumerate((True, False)):
        call = stack.multiplex()
        message = request([3 + stream], 5)
        await call.write(
            pb.MultiplexRequest(
                submit=pb.Submit(stream=1, request=message.SerializeToString(), moved=moved)
            )
        )
        calls.append(call)
    ends = [await _end(call) for call in calls]
    assert ends[0].reason == pb.FINISH_REASON_LENGTH, ends[0]
    assert ends[1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], ends[1]
    assert (await running)[0] == expected([1], 60)
    assert (await waiting)[0] == expected([2], 5)
    for call in calls:
        call.cancel()
    await stack.settle()


async def _end(call: grpc.aio.StreamStreamCall) -> pb.Finish:
    """The end of the only request of a stream."""
    while not (response := await call.read()).finished:
        pass
    finish: pb.Finish = response.finished[0].finish
    return finish


async def test_requests_that_wait_for_a_worker_are_not_refused(
    start: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a worker the rate of the queue does not determine the wait."""
    passed = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + passed

    monkeypatch.setattr(queue_bounds, "time", Clock)
    stack = await start(worker_info(num_slots=1), max_waiting_seconds=0.01)
    await stack.workers[0].stop()
    await eventually(lambda: not stack.engine.ready)
    calls = []
    for number in range(4):
        calls.append(asyncio.create_task(collect(stack.stub.Generate(request([number], 5)))))
        await eventually(lambda n=number: stack.engine.load().waiting == n + 1)
        passed += 10.0
    assert stack.engine.load().retry_after_seconds == 0
    await stack.workers[0].start(stack.addresses[0])
    for number, call in enumerate(calls):
        assert (await asyncio.wait_for(call, 20))[0] == expected([number], 5)
    await stack.settle()


async def test_a_request_with_room_is_admitted_after_a_slow_queue(
    start: StartStack,
) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_seconds=0.01)
    stack.workers[0].step_seconds = 0.01
    for first in range(1, 30, 3):
        calls = [collect(stack.stub.Generate(request([first + n], 10))) for n in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)
        tokens, _, _ = await collect(stack.stub.Generate(request([first], 10)))
        assert tokens == expected([first], 10)
    await stack.settle()


async def _fill(stack: Stack, waiting: pb.GenerateRequest) -> list[asyncio.Task[Any]]:
    """Two requests: one runs on the only slot, `waiting` waits for it."""
    stack.workers[0].step_seconds = 0.01
    running = asyncio.create_task(collect(stack.stub.Generate(request([1], 100))))
    await eventually(lambda: _counts(stack) == (1, 0))
    second = asyncio.create_task(collect(stack.stub.Generate(waiting)))
    await eventually(lambda: _counts(stack) == (1, 1))
    return [running, second]


async def test_a_queue_is_bounded_in_tokens(start: StartStack) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_tokens=60)
    running, alone = await _fill(stack, request([2] * 100, 5))
    with pytest.raises(grpc.aio.AioRpcError, match="100 tokens are waiting") as caught:
        await collect(stack.stub.Generate(request([3], 5)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    resumed = request([3], 5, resume_token_ids=expected([3], 2))
    rest = [token async for news in stack.stub.Generate(resumed) for token in news.token_ids]
    assert rest == expected([3], 5)[2:]
    assert (await alone)[0] == expected([2] * 100, 5)
    await running
    await stack.settle()


@pytest.mark.parametrize("more", [{}, {"beam_search": pb.BeamSearch(width=2)}], ids=["", "beams"])
async def test_the_bound_counts_the_tokens_that_would_be_queued(
    start: StartStack, more: dict[str, object]
) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_tokens=60)
    calls = await _fill(stack, request([2] * 50, 5))
    with pytest.raises(grpc.aio.AioRpcError, match="50 tokens are waiting") as caught:
        await collect(stack.stub.Generate(request([3] * 20, 5, **more)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.gather(*calls)
    await stack.settle()


async def test_a_gateway_that_does_not_read_cannot_fill_the_memory(
    start: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own buffers are megabytes, so the service is called here as gRPC would call it."""
    monkeypatch.setattr(delivery, "PAGE_ROWS", 100)
    stack = await start(worker_info(num_blocks=500, num_slots=8))
    reads, written = asyncio.Event(), []
    count, taken = 60, 0

    class Context:
        def peer(self) -> str:
            return "test"

        async def write(self, message: pb.MultiplexResponse) -> None:
            await reads.wait()
            written.append(message)

    async def requests() -> AsyncIterator[pb.MultiplexRequest]:
        nonlocal taken
        for number in range(count):
            await eventually(lambda: stack.engine.num_open < 8)
            taken += 1
            submit = pb.Submit(stream=number, request=request([number, 2], 40).SerializeToString())
            yield pb.MultiplexRequest(submit=submit)
        await eventually(lambda: sum(len(m.finished) for m in written) == count)

    service = InferenceService(stack.engine)
    serving = asyncio.create_task(service.Multiplex(requests(), Context()))
    await eventually(lambda: taken > 1 and stack.engine.num_open == 0)
    for _ in range(200):  # turns of the event loop, which would read a request
        await asyncio.sleep(0)
    assert taken <= 2 * 8, "it took requests although the deltas are not read"
    assert stack.engine.num_open == 0, "what was taken runs to its end"
    reads.set()
    await serving
    assert sum(len(m.token_ids) // 4 for m in written) == 40 * count
    assert max(len(m.streams) // 4 for m in written) < 100 + 2 * 8
    await stack.settle()


@pytest.mark.parametrize("slo", [None, 20.0])
async def test_chunks_beside_decodes_keep_the_target(start: StartStack, slo: float | None) -> None:
    stack = await start(worker_info(num_blocks=400, budget=160), tpot_slo_ms=slo)
    worker = stack.workers[0]
    worker.step_seconds, worker.token_seconds = 0.01, 0.0005
    running = asyncio.create_task(collect(stack.stub.Generate(request([1], 150))))
    await eventually(lambda: worker.steps > 5)
    long = [[n] * 180 for n in range(2, 5)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 3))) for p in long))
    assert [tokens for tokens, _, _ in results] == [expected(p, 3) for p in long]
    assert (await running)[0] == expected([1], 150)
    largest = max(worker.chunks)
    assert largest == 159 if slo is None else largest <= 24, worker.chunks
    await stack.settle()
