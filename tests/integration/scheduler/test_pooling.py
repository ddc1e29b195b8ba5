"""Requests without output at a real scheduler with scripted workers: each ends with its vector."""

import asyncio
from typing import Any

import grpc
import pytest

from pagewire.packing import pack, unpack_floats
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb
from support.scripted.scheduler_stack import MODEL, Stack, worker_info
from support.scripted.scripted_worker import vector_at
from support.waiting import eventually

SIZE = 6
PROMPTS = [[number, *range(number % 50)] for number in range(1, 61)]


def pooling_info(*, whole_prompt: bool = False, **sizes: int) -> worker_pb.WorkerInfo:
    info = worker_info(**sizes)
    info.pooling.task, info.pooling.size, info.pooling.activation = "embed", SIZE, "none"
    info.pooling.whole_prompt, info.pooling.pair_format = whole_prompt, "tokenizer"
    return info


def embed(prompt: list[int], **fields: object) -> pb.GenerateRequest:
    params = pb.PoolingParams(task=pb.POOLING_TASK_EMBED)
    ids = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(prompt_token_ids=ids, pooling=params, **fields)


async def run_all(stack: Stack) -> list[pb.PoolResponse]:
    """Runs all prompts; their vectors must be those of the script."""
    answers = await asyncio.gather(*(stack.stub.Pool(embed(prompt)) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.values) == vector_at(prompt, SIZE)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == 0
    return answers


@pytest.mark.parametrize("whole_prompt", [False, True])
async def test_prompts_are_chunked_and_batched(start, whole_prompt: bool) -> None:
    """The pool has room for only a part of the prompts."""
    stack = await start(pooling_info(whole_prompt=whole_prompt, num_blocks=32, budget=10))
    await run_all(stack)
    for tokens in (list(range(60, 100)), [*range(60, 99), 7]):
        answer = await stack.stub.Pool(embed(tokens))
        assert list(answer.values) == vector_at(tokens, SIZE)
    assert answer.usage.cached_tokens == (0 if whole_prompt else 36)  # whole blocks
    await stack.settle()


async def test_a_vector_comes_with_the_end_of_a_stream(start) -> None:
    stack = await start(pooling_info())
    [only] = [response async for response in stack.stub.Generate(embed([4, 5, 6]))]
    assert unpack_floats(only.finish.pooled).tolist() == vector_at([4, 5, 6], SIZE)
    assert only.finish.reason == pb.FINISH_REASON_STOP
    assert (list(only.token_ids), only.text) == ([], "")
    await stack.settle()


async def test_lost_workers_lose_nothing(start) -> None:
    stack = await start(pooling_info(budget=10), pooling_info(budget=10))
    stack.workers[0].break_after, stack.workers[1].break_after = 5, 11
    await run_all(stack)
    assert [worker.break_after for worker in stack.workers] == [None, None]
    await stack.wait_ready(2)
    await stack.settle()


async def test_a_failed_slot_runs_again_or_fails_alone(start) -> None:
    stack = await start(pooling_info())
    stack.workers[0].failing[7] = 2
    await run_all(stack)
    stack.workers[0].failing[8], stack.workers[0].retryable = 1, False
    bad = asyncio.ensure_future(_refused(stack, embed([8, 1, 2])))
    await asyncio.gather(*(stack.stub.Pool(embed([9, number])) for number in range(5)))
    assert (await bad).code() is grpc.StatusCode.INTERNAL
    await stack.settle()


@pytest.mark.parametrize("numbers", [0, SIZE + 1])
async def test_a_vector_of_the_wrong_size_breaks_its_workers_link_alone(
    start, numbers: int, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start(pooling_info(budget=10), pooling_info(budget=10))
    bad = worker_pb.StepResult(step=5, token_ids=pack([0]), pooled=bytes(4 * numbers))
    stack.workers[0].bad_result = (5, bad)
    await run_all(stack)
    assert stack.workers[0].bad_result is None
    assert f"has {numbers} numbers for 1 vectors of {SIZE}" in caplog.text
    await stack.wait_ready(2)
    await stack.settle()


async def test_deadlines_and_aborts_free_everything(start) -> None:
    stack = await start(pooling_info(num_slots=2))
    stack.workers[0].step_seconds = 2
    late = [_refused(stack, embed([5, 6, number], deadline_ms=60)) for number in range(3)]
    for error in await asyncio.gather(*late):
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (error.details() or "").endswith("of 60 ms; give it more time")
    calls = [stack.stub.Pool(embed([7, 8, 9], request_id=f"r{number}")) for number in range(9)]
    await eventually(lambda: stack.engine.num_open == len(calls))
    stack.workers[0].step_seconds = 0
    for call in calls[:4]:
        call.cancel()
    assert (await stack.stub.Abort(pb.AbortRequest(request_id="r8"))).found
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[8], grpc.aio.AioRpcError)
    assert outcomes[8].code() is grpc.StatusCode.CANCELLED
    assert outcomes[8].details() == "the request was aborted"
    assert [list(answer.values) for answer in outcomes[4:8]] == 4 * [vector_at([7, 8, 9], SIZE)]
    await stack.settle()


async def test_workers_of_another_task_are_not_used(
    start, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start(pooling_info())
    [model] = (await stack.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.task) == (MODEL, pb.POOLING_TASK_EMBED)
    await run_all(stack)
    await stack.workers[0].stop()
    await stack.wait_ready(0)
    stack.workers[0].info.ClearField("pooling")
    await stack.workers[0].start(stack.addresses[0])
    await eventually(lambda: "with the same --task" in caplog.text)
    assert stack.engine.load().ready_workers == 0


async def test_a_model_that_generates_takes_none(start) -> None:
    stack = await start(worker_info())
    error = await _refused(stack, embed([1, 2]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "generates text only; use /v1/chat/completions" in error.details()
    await stack.settle()


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_output": pb.StructuredOutput(json_object=True)},
        {"reasoning_budget": pb.ReasoningBudget(max_tokens=1, end="x")},
    ],
)
async def test_a_form_of_the_output_is_refused_by_name(start, fields: dict[str, Any]) -> None:
    stack = await start(pooling_info())
    error = await _refused(stack, embed([1, 2], **fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        f"{next(iter(fields))} is about output, and this request has none; remove it"
    )


async def _refused(stack: Stack, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Pool(request)
    return refused.value
