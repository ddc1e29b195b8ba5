"""Reservations of a scheduler: the requests that run meanwhile, and their end."""

import asyncio

import pytest

from pagewire.errors import Code
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import (
    collect,
    expected,
    request,
    worker_info,
)
from support.waiting import eventually


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.scheduler.requests.reservations.MAX_SECONDS", 1.0)
    monkeypatch.setattr("pagewire.scheduler.requests.reservations.PAUSE_SECONDS", 0.3)


async def test_requests_of_gateways_are_given_back_and_new_ones_refused(start, connect) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.02
    mine, other = connect(stack), connect(stack)
    await mine.submit(1, request([5], 150))
    await other.submit(1, request([6], 150))
    await eventually(lambda: mine.tokens.get(1) and other.tokens.get(1))
    await mine.reserve()
    await eventually(lambda: mine.alone and 1 in mine.finished and 1 in other.finished)
    assert not other.alone
    assert mine.reservation_changes == other.reservation_changes == 1
    await mine.submit(2, request([7], 150))
    await eventually(lambda: mine.tokens.get(2))
    await other.submit(2, request([8], 150))
    await eventually(lambda: 2 in other.finished)
    for finish in (mine.finished[1], other.finished[1], other.finished[2]):
        assert finish.error.code == Code.UNAVAILABLE
    assert stack.engine.num_open == 1
    await mine.submit(3, request([9], 150))
    await eventually(lambda: 2 in mine.finished)
    assert mine.finished[2].error.code == Code.UNAVAILABLE, "one at a time"
    await mine.reserve(False)
    await eventually(lambda: other.reservation_changes == 2 and not mine.alone)
    await other.submit(3, request([8], 10))
    await eventually(lambda: 3 in other.finished)
    assert other.tokens[3] == expected([8], 10)
    assert 3 not in mine.finished, "a request that runs when the reservation ends goes on"


async def test_a_reservation_ends_in_time_and_the_next_begins_after_a_pause(start, connect) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.02
    first, second, other = connect(stack), connect(stack), connect(stack)
    await first.reserve()
    await eventually(lambda: first.alone)
    began = asyncio.get_running_loop().time()
    await second.reserve()
    await eventually(lambda: other.reservation_changes == 2)
    assert 0.8 < asyncio.get_running_loop().time() - began < 1.8
    assert not second.alone
    await other.submit(1, request([8], 5))
    await eventually(lambda: 1 in other.finished)
    assert other.finished[1].reason == pb.FINISH_REASON_LENGTH, "others run between"
    await eventually(lambda: second.alone)
    second.call.cancel()
    await eventually(lambda: other.reservation_changes == 4)


async def test_a_gateway_is_alone_once_requests_of_others_have_ended(start, connect) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.01
    mine = connect(stack)
    running = asyncio.create_task(collect(stack.stub.Generate(request([5], 40))))
    await eventually(lambda: stack.engine.load().running == 1)
    await mine.reserve()
    await eventually(lambda: mine.reservation_changes == 1)
    assert not mine.alone
    late = asyncio.create_task(collect(stack.stub.Generate(request([6], 10))))
    await eventually(lambda: mine.alone)
    assert (await running)[0] == expected([5], 40)
    assert not late.done()
    assert stack.engine.num_open == 0
    await eventually(lambda: mine.reservation_changes == 2)
    assert (await late)[0] == expected([6], 10)
