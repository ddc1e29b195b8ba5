"""The scheduler's gRPC service over real connections, with scripted workers as its peers."""

import asyncio
import math
import random
from dataclasses import dataclass, field

import grpc
import pytest

from pagewire.errors import Code
from pagewire.helpers.pool import HelperPool
from pagewire.lifecycle.process import essential
from pagewire.packing import pack, unpack, unpack_unsigned
from pagewire.rpc.checksums import ChecksumWriter
from pagewire.scheduler import metrics
from pagewire.scheduler.workers.link import CHECKS_PER_STEP
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb
from support.scripted.scheduler_stack import (
    MODEL,
    VOCAB,
    collect,
    expected,
    read_all,
    request,
    worker_info,
)
from support.waiting import eventually


async def test_generate_gives_every_token_once(start) -> None:
    stack = await start(worker_info())
    tokens, text, finish = await collect(stack.stub.Generate(request([5, 6, 7], 30)))
    assert tokens == expected([5, 6, 7], 30)
    assert text == stack.engine.tokenizer.decode(tokens)
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 30)
    assert 0 <= finish.queue_seconds < 5
    await stack.settle()


async def test_many_requests_under_memory_pressure(start) -> None:
    # A machine that pauses may make waits look long: no request must be refused for this reason.
    stack = await start(
        worker_info(num_blocks=20, num_slots=6, budget=16), max_waiting_seconds=math.inf
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(40)]
    results = await asyncio.gather(
        *(collect(stack.stub.Generate(request(p, 20 + i % 10))) for i, p in enumerate(prompts))
    )
    for i, (prompt, (tokens, _, _)) in enumerate(zip(prompts, results, strict=True)):
        assert tokens == expected(prompt, 20 + i % 10)
    assert stack.engine.load().preemptions > 0
    await stack.settle()


async def test_stop_token_ends_and_counts(start) -> None:
    stack = await start(worker_info())
    want = expected([9], 6)
    message = request([9], 30)
    message.stop.stop_token_ids.append(want[5])
    tokens, _, finish = await collect(stack.stub.Generate(message))
    first = want.index(want[5]) + 1
    assert tokens == want[:first]
    assert finish.reason == pb.FINISH_REASON_STOP
    assert finish.stop_token_id == want[5]
    await stack.settle()


async def test_stop_string_ends_within_a_token(start) -> None:
    stack = await start(worker_info())
    full = stack.engine.tokenizer.decode(expected([4, 4], 40))
    stop = full[10:13]
    message = request([4, 4], 40)
    message.stop.stop.append(stop)
    _, text, finish = await collect(stack.stub.Generate(message))
    assert text == full[: full.find(stop)]
    assert finish.stop_string == stop
    await stack.settle()


async def test_resume_continues_where_the_first_attempt_ended(start) -> None:
    stack = await start(worker_info())
    full_tokens, full_text, _ = await collect(stack.stub.Generate(request([8, 1], 25)))
    head, head_text = [], ""
    async for response in stack.stub.Generate(request([8, 1], 25)):
        head += response.token_ids
        head_text += response.text
        if len(head) >= 10:
            break
    message = request([8, 1], 25, resume_token_ids=head)
    tokens, text, index = [], "", None
    async for response in stack.stub.Generate(message):
        index = response.index if index is None else index
        tokens += response.token_ids
        text += response.text
        finish = response.finish
    assert index == len(head)
    assert head + tokens == full_tokens
    assert head_text + text == full_text
    assert finish.usage.completion_tokens == 25
    await stack.settle()


async def test_resume_of_a_finished_request_ends_at_once(start) -> None:
    stack = await start(worker_info())
    message = request([8, 1], 3, resume_token_ids=expected([8, 1], 3))
    tokens, _, finish = await collect(stack.stub.Generate(message))
    assert tokens == []
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert finish.usage.completion_tokens == 3


async def test_a_broken_worker_loses_and_repeats_no_token(start) -> None:
    stack = await start(worker_info(), worker_info())
    stack.workers[0].break_after = 12
    stack.workers[1].break_after = 25
    prompts = [[n, n + 1, n + 2] for n in range(20)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 60))) for p in prompts))
    for prompt, (tokens, text, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 60)
        assert text == stack.engine.tokenizer.decode(tokens)
    await stack.wait_ready(2)
    await stack.settle()


async def test_a_worker_that_does_not_answer_is_lost(start) -> None:
    stack = await start(worker_info(), worker_info(), step_timeout=0.8)
    stack.workers[0].hang_after = 12
    prompts = [[n, n + 1, n + 2] for n in range(12)]
    began = asyncio.get_running_loop().time()
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 60))) for p in prompts))
    assert asyncio.get_running_loop().time() - began >= 0.8
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 60)
    await stack.wait_ready(2)
    await stack.settle()


BAD_RESULTS = {
    "another step": worker_pb.StepResult(step=1, token_ids=pack([1])),
    "too few rows": worker_pb.StepResult(step=12),
    "half a token": worker_pb.StepResult(step=12, token_ids=b"12345"),
    "an unknown slot": worker_pb.StepResult(step=12, errors=[worker_pb.SlotError(slot=99)]),
    "unknown rows": worker_pb.StepResult(step=12, logprob_rows=pack([99]), logprobs=pack([0])),
    "no values": worker_pb.StepResult(step=12, token_ids=pack([1]), logprob_rows=pack([0])),
}


@pytest.mark.parametrize("bad", BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
async def test_a_bad_result_breaks_its_workers_link_alone(
    start, bad: worker_pb.StepResult, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start(worker_info(), worker_info())
    stack.workers[0].bad_result = (12, bad)
    prompts = [[n, n + 1, n + 2] for n in range(12)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 60))) for p in prompts))
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 60)
    assert stack.workers[0].bad_result is None
    assert f"StepResult of {bad.ByteSize()} bytes with CRC-32" in caplog.text
    await stack.wait_ready(2)
    await stack.settle()


@pytest.mark.parametrize("fault", ["silent", "unread"])
async def test_a_stream_that_works_in_one_direction_only_is_closed(
    start, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A damaged length may make the other side wait forever for the rest of a message."""
    for module in ("pagewire.scheduler.workers.link", "support.scripted.scripted_worker"):
        monkeypatch.setattr(f"{module}.HEARTBEAT_SECONDS", 0.1)
    stack = await start(worker_info())
    worker = stack.workers[0]
    worker.hang_after = 5
    worker.says_alive, worker.reads = fault != "silent", 3 if fault == "unread" else None
    running = asyncio.create_task(collect(stack.stub.Generate(request([1, 2], 60))))
    losses = metrics.WORKER_LOSSES._value.get()
    await eventually(lambda: metrics.WORKER_LOSSES._value.get() > losses)
    assert worker.hang_after is None
    worker.says_alive, worker.reads = True, None
    tokens, _, _ = await asyncio.wait_for(running, 10)
    assert tokens == expected([1, 2], 60)
    await stack.settle()


async def test_an_idle_worker_is_not_lost(start, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, checks = asyncio.sleep, 0
    step_timeout = 0.4321

    async def counting(seconds: float) -> None:
        nonlocal checks
        checks += seconds == step_timeout / CHECKS_PER_STEP
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", counting)
    stack = await start(worker_info(), step_timeout=step_timeout)
    await collect(stack.stub.Generate(request([1], 5)))
    losses = metrics.WORKER_LOSSES._value.get()
    idle_since = checks
    await eventually(lambda: checks > idle_since + 2 * CHECKS_PER_STEP)
    await collect(stack.stub.Generate(request([1], 5)))
    assert metrics.WORKER_LOSSES._value.get() == losses


async def test_a_request_that_ends_workers_fails_alone(start) -> None:
    stack = await start(worker_info(), worker_info())
    for worker in stack.workers:
        worker.poison = 77
        worker.step_seconds = 0.002
    others = [[n, 1, 2] for n in range(10)]
    calls = [collect(stack.stub.Generate(request(p, 40))) for p in (*others, [77, 1])]
    *results, failure = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(failure, grpc.aio.AioRpcError)
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "workers in a row were lost while they computed this request" in failure.details()
    for prompt, result in zip(others, results, strict=True):
        assert result[0] == expected(prompt, 40)
    assert sum(worker.broken for worker in stack.workers) == 4, "two among others, two alone"
    await stack.wait_ready(2)
    await stack.settle()


async def test_planning_that_fails_ends_the_scheduler(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await start(worker_info())
    fatal: list[BaseException] = []
    stack.engine._on_fatal = fatal.append
    monkeypatch.setattr("pagewire.scheduler.workers.ready_workers.encode_step", lambda *_: 1 / 0)
    call = stack.stub.Generate(request([1], 5))
    await eventually(lambda: fatal)
    assert isinstance(fatal[0], ZeroDivisionError)
    call.cancel()


async def test_a_stream_without_deltas_carries_load(start) -> None:
    stack = await start(worker_info())
    call = stack.multiplex()
    for _ in range(4):
        assert (await asyncio.wait_for(call.read(), 3)).HasField("load")
    call.cancel()


async def test_work_spreads_over_workers(start) -> None:
    stack = await start(worker_info(), worker_info())
    await asyncio.gather(*(collect(stack.stub.Generate(request([n], 40))) for n in range(16)))
    steps = [worker.steps for worker in stack.workers]
    assert min(steps) > 0.5 * max(steps)


async def test_a_failed_slot_is_run_again(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].failing[7] = 2
    good, bad = await asyncio.gather(
        collect(stack.stub.Generate(request([1], 20))),
        collect(stack.stub.Generate(request([7], 20))),
    )
    assert good[0] == expected([1], 20)
    assert bad[0] == expected([7], 20)
    await stack.settle()


async def test_a_slot_that_keeps_failing_fails_alone(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].failing[7] = 100
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(request([7], 20)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "scripted failure" in caught.value.details()
    tokens, _, _ = await collect(stack.stub.Generate(request([1], 20)))
    assert tokens == expected([1], 20)
    await stack.settle()


async def test_cancelling_frees_the_blocks_within_two_steps(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.02
    call = stack.stub.Generate(request([3, 3], 150))
    async for _ in call:
        break
    assert stack.engine.load().running == 1
    call.cancel()
    async with asyncio.timeout(5):
        while stack.engine.load().running:
            await asyncio.sleep(0)
    steps = stack.workers[0].steps
    await stack.settle()
    assert stack.workers[0].steps - steps <= 2


async def test_a_request_can_be_aborted_by_an_id_of_the_scheduler(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.01
    call = stack.stub.Generate(request([3], 150))
    response = await call.read()
    assert response.request_id
    assert (await stack.stub.Abort(pb.AbortRequest(request_id=response.request_id))).found
    while not response.HasField("finish"):
        response = await call.read()
    assert response.finish.reason == pb.FINISH_REASON_ABORT
    await stack.settle()


async def test_requests_are_aborted_on_workers_of_different_sizes(start) -> None:
    stack = await start(*[worker_info(num_slots=slots) for slots in (1, 8, 1)])
    for worker in stack.workers:
        worker.step_seconds = 0.01
    ids = [f"r{n}" for n in range(8)]
    running = [
        asyncio.create_task(collect(stack.stub.Generate(request([n], 150, request_id=name))))
        for n, name in enumerate(ids)
    ]
    await eventually(lambda: stack.engine.load().running == len(ids))
    for name in ids:
        assert (await stack.stub.Abort(pb.AbortRequest(request_id=name))).found
    for _, _, finish in await asyncio.gather(*running):
        assert finish.reason == pb.FINISH_REASON_ABORT
    await stack.settle()


async def test_a_waiting_request_can_be_aborted_by_id(start) -> None:
    stack = await start(worker_info(num_slots=1))
    stack.workers[0].step_seconds = 0.01
    running = asyncio.create_task(collect(stack.stub.Generate(request([3], 50))))
    waiting = asyncio.create_task(
        collect(stack.stub.Generate(request([4], 50, request_id="second")))
    )
    async with asyncio.timeout(5):
        while stack.engine.load().waiting != 1:
            await asyncio.sleep(0.01)
    assert (await stack.stub.Abort(pb.AbortRequest(request_id="second"))).found
    assert not (await stack.stub.Abort(pb.AbortRequest(request_id="third"))).found
    _, _, finish = await waiting
    assert finish.reason == pb.FINISH_REASON_ABORT
    assert (await running)[0] == expected([3], 50)
    await stack.settle()


async def test_the_next_turn_finds_the_last_one_in_the_cache(start) -> None:
    stack = await start(worker_info())
    first, _, finish = await collect(stack.stub.Generate(request([5, 6, 7], 30)))
    assert finish.usage.cached_tokens == 0
    prompt = [5, 6, 7, *first, 8, 9]
    tokens, _, finish = await collect(stack.stub.Generate(request(prompt, 10)))
    assert tokens == expected(prompt, 10)
    assert finish.usage.cached_tokens == 32
    await stack.settle()


async def test_a_common_beginning_of_prompts_that_come_together_is_computed_once(
    start,
) -> None:
    stack = await start(worker_info())
    prompts = [[*range(40), n] for n in range(6)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 5))) for p in prompts))
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 5)
    cached = sorted(finish.usage.cached_tokens for _, _, finish in results)
    assert cached == [0, 40, 40, 40, 40, 40]
    await stack.settle()


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_worker_is_told_which_slots_share_blocks_if_it_wants_to(start, wanted) -> None:
    info = worker_info(num_blocks=100)
    info.prefix_groups = wanted
    stack = await start(info)
    stack.workers[0].step_seconds = 0.02  # none ends before all have arrived
    prompts = [[*range(40), n] for n in range(5)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 30))) for p in prompts))
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 30)
    assert stack.workers[0].most_grouped == (5 if wanted else 0)
    await stack.settle()


async def test_requests_that_share_a_failed_prefill_run_again(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.005
    stack.workers[0].failing[7] = 2
    prompts = [[7, *range(40), n] for n in range(6)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(request(p, 5))) for p in prompts))
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == expected(prompt, 5)
    await stack.settle()


async def test_salts_keep_prompts_apart(start) -> None:
    stack = await start(worker_info())

    async def cached(salt: str) -> int:
        message = request(list(range(20)), 3, cache_salt=salt)
        _, _, finish = await collect(stack.stub.Generate(message))
        return finish.usage.cached_tokens

    assert [await cached(salt) for salt in ("", "", "a", "a", "b", "")] == [0, 16, 0, 16, 0, 16]


@pytest.mark.parametrize("checked", [True, False])
async def test_a_broken_invariant_is_found_after_the_step_if_asked_for(start, checked) -> None:
    stack = await start(worker_info(), check_invariants=checked)
    [worker] = stack.engine._workers
    worker.batch.pool.idle += 1
    call = asyncio.create_task(collect(stack.stub.Generate(request([1, 2], 5))))
    if checked:
        await eventually(lambda: not stack.engine.ready)
        call.cancel()
    else:
        await call


async def test_the_fault_of_an_essential_task_is_fatal() -> None:
    async def fail() -> None:
        raise AssertionError("a block is lost")

    faults: list[BaseException] = []
    essential(asyncio.create_task(fail()), faults.append)
    await eventually(lambda: faults)
    assert str(faults[0]) == "a block is lost"


async def test_states_are_visible_in_the_metrics(start) -> None:
    stack = await start(worker_info(num_slots=1))
    stack.workers[0].step_seconds = 0.01
    calls = [asyncio.create_task(collect(stack.stub.Generate(request([n], 30)))) for n in (1, 2)]

    def states() -> dict[str, float]:
        samples = metrics.OPEN_REQUESTS.collect()[0].samples
        return {sample.labels["state"]: sample.value for sample in samples}

    await eventually(lambda: states() == {"pending": 1, "prefill": 0, "decode": 1})
    await asyncio.gather(*calls)
    await stack.settle()
    assert set(states().values()) == {0}


async def test_priority_goes_first(start) -> None:
    stack = await start(worker_info(num_slots=1), policy="priority")
    stack.workers[0].step_seconds = 0.02
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        await collect(stack.stub.Generate(request([3], 10, priority=priority)))
        order.append(name)

    first = asyncio.create_task(run("first", 0))
    async with asyncio.timeout(5):
        while stack.engine.load().running != 1:
            await asyncio.sleep(0.001)
    low = asyncio.create_task(run("low", 5))
    await eventually(lambda: stack.engine.load().waiting == 1)
    high = asyncio.create_task(run("high", -5))
    await asyncio.gather(first, low, high)
    assert order == ["first", "high", "low"]


NAN_CHAT = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x")])
NAN_CHAT.template_kwargs.fields["a"].number_value = float("nan")
RESERVED_CHAT = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")])
RESERVED_CHAT.template_kwargs["messages"] = "b"
TWO_TOOLS_CHAT = pb.ChatInput(
    messages=[pb.ChatMessage(role="user", content="a")],
    tools='[{"type": "function", "function": {"name": "f"}}]',
)
TWO_TOOLS_CHAT.template_kwargs["tools"] = "b"

BAD_REQUESTS = {
    "no input": (pb.GenerateRequest(), "input"),
    "empty prompt": (pb.GenerateRequest(prompt=""), "prompt"),
    "empty ids": (pb.GenerateRequest(prompt_token_ids=pb.TokenIds()), "prompt"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatInput()), "messages"),
    "id outside": (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[VOCAB])), "300"),
    "too long": (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * 200)),
        "However, you requested 201 tokens (200 in the prompt, 1 in the completion).",
    ),
    "too many": (
        request([1], 200),
        "length of the prompt or completion. (context_length_exceeded: max_tokens)",
    ),
    "too many at least": (
        pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=[1]), stop=pb.StopConditions(min_tokens=200)
        ),
        "201 tokens (1 in the prompt, 200 in the completion). Please reduce the length of the "
        "prompt or completion. (context_length_exceeded: min_tokens)",
    ),
    "temperature": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(temperature=float("nan"))),
        "temperature is nan",
    ),
    "top_p": (pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(top_p=0)), "top_p"),
    "min_p": (pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(min_p=2)), "min_p"),
    "presence": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(presence_penalty=-3)),
        "presence_penalty is -3.0; it must be between -2 and 2",
    ),
    "frequency": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(frequency_penalty=math.inf)),
        "frequency_penalty is inf",
    ),
    "repetition": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(repetition_penalty=0)),
        "repetition_penalty is 0; it must be above 0 and at most 2",
    ),
    "bias": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(logit_bias={7: math.nan})),
        "logit_bias.7 is nan; it must be between -100 and 100",
    ),
    "biases": (
        pb.GenerateRequest(
            prompt="a", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))
        ),
        "logit_bias has 301 entries; at most 300 are allowed",
    ),
    "biased id": (
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(logit_bias={VOCAB: 1, 2: 1})),
        "logit_bias: token id 300 is outside the model's vocabulary of 300 ids; remove it",
    ),
    "no tokens": (pb.GenerateRequest(prompt="a", stop=pb.StopConditions(max_tokens=0)), "at least"),
    "stop": (pb.GenerateRequest(prompt="a", stop=pb.StopConditions(stop=[""])), "empty string"),
    "stops": (pb.GenerateRequest(prompt="a", stop=pb.StopConditions(stop=["a"] * 17)), "17"),
    "stop text": (
        pb.GenerateRequest(prompt="a", detokenize=False, stop=pb.StopConditions(stop=["a"])),
        "detokenize",
    ),
    "priority": (request([1], 2, priority=3), "--policy priority"),
    "resume": (request([1], 2, resume_token_ids=[1, 2, 3]), "resume"),
    "resume id": (request([1], 9, resume_token_ids=[VOCAB]), "vocabulary"),
    "long text": (pb.GenerateRequest(prompt="a" * 5001), "5001 characters and at most 5000"),
    "long chat": (
        pb.GenerateRequest(
            chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a" * 5001)])
        ),
        "at most 5000",
    ),
    "messages": (
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")] * 4097)),
        "messages has 4097",
    ),
    "template variable": (pb.GenerateRequest(chat=NAN_CHAT), "chat_template_kwargs: Fail"),
    "reserved variable": (
        pb.GenerateRequest(chat=RESERVED_CHAT),
        "chat_template_kwargs.messages cannot be set: chat templates get it",
    ),
    "tools and variable": (
        pb.GenerateRequest(chat=TWO_TOOLS_CHAT),
        "chat_template_kwargs.tools and tools are both given; remove one",
    ),
    "id with a line end": (request([1], 2, request_id="a\nb"), "printable"),
    "long id": (request([1], 2, request_id="a" * 257), "256"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_requests_are_refused_with_a_reason(start, name: str) -> None:
    stack = await start(worker_info())
    message, words = BAD_REQUESTS[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()
    tokens, _, _ = await collect(stack.stub.Generate(request([1], 5)))
    assert tokens == expected([1], 5)


async def test_the_trailers_of_an_error_have_its_field_and_reason(start) -> None:
    stack = await start(worker_info())
    for message, name in ((request([1] * 200, 1), "prompt"), (request([1], 200), "max_tokens")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.Generate(message))
        trailers = dict(caught.value.trailing_metadata())
        assert trailers["pagewire-error-field"] == name
        assert trailers["pagewire-error-reason"] == "context_length_exceeded"


async def test_a_draining_scheduler_says_so_before_anything_else(start) -> None:
    """Proxies try another scheduler by the reason, but not after other metadata of an answer."""
    stack = await start(worker_info())
    stack.engine.intake.draining = True
    call = stack.stub.Generate(request([1], 5), metadata=(("x-request-id", "trace-9"),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "x-request-id" not in dict(await call.initial_metadata())
    assert dict(caught.value.trailing_metadata())["pagewire-error-reason"] == "draining"


async def test_the_metadata_of_a_call_may_have_its_id(start) -> None:
    stack = await start(worker_info())
    metadata = (("x-request-id", "trace-9"),)
    calls = [stack.stub.Generate(request([n], 5), metadata=metadata) for n in (1, 2)]
    for n, call in enumerate(calls, 1):
        responses = [response async for response in call]
        assert dict(await call.initial_metadata())["x-request-id"] == "trace-9"
        assert responses[0].request_id.startswith("trace-9.")
        assert [t for r in responses for t in r.token_ids] == expected([n], 5)
    call = stack.stub.Generate(request([1], 5, request_id="own"), metadata=metadata)
    assert (await call.read()).request_id == "own"
    with pytest.raises(grpc.aio.AioRpcError, match="x-request-id must have") as caught:
        await collect(stack.stub.Generate(request([1], 5), metadata=(("x-request-id", "x" * 129),)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_model_is_not_found(start) -> None:
    stack = await start(worker_info())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(request([1], 5, model="other" * 20_000)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND, "a status must not quote it all"


async def test_larger_than_the_pool_is_refused(start) -> None:
    stack = await start(worker_info(num_blocks=11))
    with pytest.raises(grpc.aio.AioRpcError, match="KV cache holds"):
        await collect(stack.stub.Generate(request([1] * 30, 11)))
    tokens, _, _ = await collect(stack.stub.Generate(request([1] * 30, 10)))
    assert tokens == expected([1] * 30, 10)
    await stack.settle()


async def test_a_full_queue_refuses(start) -> None:
    stack = await start(worker_info(num_slots=1), max_waiting_requests=1)
    stack.workers[0].step_seconds = 0.01
    calls = [asyncio.create_task(collect(stack.stub.Generate(request([n], 30)))) for n in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
    assert refused
    assert {r.code() for r in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await stack.settle()


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    prompt_tokens: int = 0
    finish: pb.Finish | None = None


async def test_multiplex_carries_many_requests(start) -> None:
    stack = await start(worker_info(num_slots=8))
    call = stack.multiplex()
    for number in range(30):
        submit = pb.Submit(stream=number, request=request([number, 2], 15).SerializeToString())
        await call.write(pb.MultiplexRequest(submit=submit))
    received = {number: Received() for number in range(30)}
    messages, load_seen, models_seen = 0, False, False
    while any(r.finish is None for r in received.values()):
        news = await call.read()
        messages += 1
        load_seen |= news.HasField("load")
        models_seen |= news.HasField("models")
        ids, at, text_at = unpack(news.token_ids).tolist(), 0, 0
        streams = unpack_unsigned(news.streams).tolist()
        indices, text_sizes = unpack_unsigned(news.indices), unpack_unsigned(news.text_sizes)
        token_counts = news.token_counts or [1] * len(streams)
        prompt_tokens = news.prompt_tokens or [0] * len(streams)
        for i, number in enumerate(streams):
            got = received[number]
            if token_counts[i]:
                assert indices[i] == len(got.tokens)
            got.tokens += ids[at : at + token_counts[i]]
            got.text += news.text[text_at : text_at + text_sizes[i]]
            got.prompt_tokens += prompt_tokens[i]
            at += token_counts[i]
            text_at += text_sizes[i]
        for end in news.finished:
            received[end.stream].finish = end.finish
    for number, got in received.items():
        assert got.tokens == expected([number, 2], 15)
        assert got.text.decode() == stack.engine.tokenizer.decode(got.tokens)
        assert got.prompt_tokens == 2
    assert messages < 30 * 15 / 2
    assert load_seen
    assert models_seen
    call.cancel()
    await stack.settle()


async def test_a_message_that_does_not_decode_ends_its_stream(start) -> None:
    stack = await start(worker_info())
    submit = pb.Submit(stream=1, request=request([1], 150).SerializeToString())
    sent = pb.MultiplexRequest(submit=submit).SerializeToString()
    call = stack.channel.stream_stream("/pagewire.v1.Inference/Multiplex")(timeout=20)
    writer = ChecksumWriter(bytes)
    await call.write(writer.serialize(sent))
    await call.write(writer.serialize(b"\xff"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stack.settle()


async def test_a_request_that_does_not_decode_ends_alone(start) -> None:
    stack = await start(worker_info())
    call = stack.multiplex()
    for stream, data in ((1, request([1], 15).SerializeToString()), (2, b"\xff")):
        submit = pb.Submit(stream=stream, request=data)
        await call.write(pb.MultiplexRequest(submit=submit))
    ended: dict[int, pb.Finish] = {}
    async with asyncio.timeout(20):
        while len(ended) < 2:
            news = await call.read()
            ended |= {each.stream: each.finish for each in news.finished}
    assert ended[1].reason == pb.FINISH_REASON_LENGTH
    assert ended[2].error.code == Code.INVALID_ARGUMENT
    call.cancel()
    await stack.settle()


async def test_closing_a_multiplex_stream_aborts_its_requests(start) -> None:
    stack = await start(worker_info())
    stack.workers[0].step_seconds = 0.01
    call = stack.multiplex()
    for number in range(12):
        submit = pb.Submit(stream=number, request=request([number], 150).SerializeToString())
        await call.write(pb.MultiplexRequest(submit=submit))
    await call.read()
    async with asyncio.timeout(5):
        while stack.engine.num_open < 12:
            await asyncio.sleep(0.01)
    call.cancel()
    await stack.settle()


async def test_random_requests_and_aborts_leave_no_request_or_block(start) -> None:
    stack = await start(
        worker_info(num_blocks=40, num_slots=6, budget=24),
        worker_info(24, 4, 16),
        max_waiting_seconds=math.inf,
    )
    rng = random.Random(3)

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 1.5)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        call = stack.stub.Generate(request(prompt, rng.randint(1, 40)))
        leave_after = rng.choice([0, 1, 5, 1000])
        tokens: list[int] = []
        if leave_after == 0:
            call.cancel()
            return
        async for response in call:
            tokens += response.token_ids
            if len(tokens) >= leave_after:
                call.cancel()
                break
        assert tokens == expected(prompt, len(tokens))

    await asyncio.gather(*(one(n) for n in range(500)))
    await stack.settle()


async def test_chats_of_many_messages_are_read_by_a_helper(start, monkeypatch) -> None:
    """They are small in bytes, but the template makes them a long text."""
    tasks = []
    run = HelperPool.run

    async def noting(pool: HelperPool, head: bytes, *data: bytes, large: bool = False) -> bytes:
        tasks.append(head[:1])
        return await run(pool, head, *data, large=large)

    monkeypatch.setattr(HelperPool, "run", noting)
    stack = await start(worker_info())
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user")] * 200)
    ids = (await stack.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert tasks == [b"T"]
    request_all = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
    text = (await stack.stub.Detokenize(request_all)).text
    assert text == "<|start|>user\n<|end|>\n" * 200 + "<|start|>assistant\n"
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"requested more than 200 tokens \(more than 199 in the"
    ):
        [_ async for _ in stack.stub.Generate(pb.GenerateRequest(request_id="many", chat=chat))]
    assert tasks[-1:] == [b"G"]


async def test_tokenize_and_detokenize(start) -> None:
    stack = await start(worker_info())
    ids = (await stack.stub.Tokenize(pb.TokenizeRequest(text="Grüße 🙂"))).token_ids
    text = (await stack.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
    assert text == "Grüße 🙂"
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = (await stack.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    request_all = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
    text = (await stack.stub.Detokenize(request_all)).text
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    models = (await stack.stub.ListModels(pb.ListModelsRequest())).models
    assert [(m.id, m.max_model_len, m.has_chat_template) for m in models] == [(MODEL, 200, True)]
    assert (await stack.stub.GetLoad(pb.GetLoadRequest())).ready_workers == 1
