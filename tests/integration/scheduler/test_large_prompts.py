"""Large prompts: a helper process that dies or hangs fails only the request that it reads."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import Stack, StartStack, collect, worker_info
from support.waiting import eventually

TEXT = "hello world " * 1000


async def started(start: StartStack, **settings: object) -> Stack:
    """A scheduler with one helper process, which has read the text once."""
    info = worker_info(num_blocks=8000, budget=4096)
    info.max_model_len = 20_000
    stack = await start(info, max_prompt_chars=50_000, tokenizer_processes=1, **settings)
    assert (await ended(stack)).reason == pb.FINISH_REASON_LENGTH
    return stack


def large(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=TEXT, stop=pb.StopConditions(max_tokens=3, ignore_eos=True), **fields
    )


async def ended(stack: Stack) -> pb.Finish:
    _, _, finish = await collect(stack.stub.Generate(large()))
    assert finish.usage.prompt_tokens > 1000
    return finish


def helper() -> int:
    """The process id of the only helper process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == os.getpid() and b"pagewire.helpers.process" in command:
                found.append(int(folder.name))
    [pid] = found
    return pid


async def being_read(stack: Stack) -> None:
    """Waits until the helper has been given the prompt."""
    pool = stack.engine.intake.helpers._pool
    await eventually(lambda: stack.engine.endings.open.num_parsing == 1)
    await eventually(lambda: not pool._waiting and not pool._idle)
    assert stack.engine.num_open == 1


async def status_of(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), caught.value.details() or ""


async def at_rest(stack: Stack) -> None:
    """The next large prompt is read, and no request or block is left."""
    assert (await ended(stack)).reason == pb.FINISH_REASON_LENGTH
    await stack.settle()
    assert stack.engine.endings.open.num_parsing == 0


async def test_a_killed_helper_costs_the_request_that_it_read(start: StartStack) -> None:
    stack = await started(start)
    os.kill(helper(), signal.SIGSTOP)
    call = stack.stub.Generate(large())
    status = asyncio.create_task(status_of(call))
    await being_read(stack)
    os.kill(helper(), signal.SIGKILL)
    code, words = await status
    assert code is grpc.StatusCode.INTERNAL
    assert "the process that computed it ended" in words
    await at_rest(stack)


async def test_a_helper_without_an_answer_costs_the_request_that_it_read(start: StartStack) -> None:
    stack = await started(start, parse_timeout=1.0)
    before = helper()
    os.kill(before, signal.SIGSTOP)
    code, words = await status_of(stack.stub.Generate(large()))
    assert code is grpc.StatusCode.INTERNAL
    assert "it took longer than 1 s" in words
    await at_rest(stack)
    assert helper() != before


@pytest.mark.parametrize("how", ["cancelled", "aborted by its id", "late"])
async def test_a_request_that_is_being_read_can_end(start: StartStack, how: str) -> None:
    stack = await started(start)
    before = helper()
    os.kill(before, signal.SIGSTOP)
    deadline = 500 if how == "late" else None
    call = stack.stub.Generate(large(request_id="large", deadline_ms=deadline))
    reading = asyncio.create_task(collect(call))
    await being_read(stack)
    if how == "cancelled":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    elif how == "aborted by its id":
        assert (await stack.stub.Abort(pb.AbortRequest(request_id="large"))).found
        _, _, finish = await reading
        assert finish.reason == pb.FINISH_REASON_ABORT
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: stack.engine.num_open == 0)
    await at_rest(stack)
    assert helper() != before, "a helper that does not end by itself is replaced"
