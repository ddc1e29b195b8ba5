"""Log probabilities from a worker to clients: each once, and only for requests with them."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest

from pagewire.packing import unpack, unpack_floats, unpack_unsigned
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import VOCAB, expected, request, worker_info
from support.scripted.scripted_worker import logprobs_at


@dataclass
class Received:
    """All messages to a client for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    token_bytes: list[bytes] = field(default_factory=list)
    top_bytes: list[bytes] = field(default_factory=list)
    text: str = ""
    finish: pb.Finish | None = None


async def collect(call: AsyncIterator[pb.GenerateResponse], most: int = 1 << 20) -> Received:
    got = Received()
    async for response in call:
        got.tokens += response.token_ids
        got.logprobs += response.logprobs
        got.top_ids += response.top_token_ids
        got.top += response.top_logprobs
        got.token_bytes += response.token_bytes
        got.top_bytes += response.top_token_bytes
        got.text += response.text
        if response.HasField("finish"):
            got.finish = response.finish
        if len(got.tokens) >= most:
            break
    return got


def check(got: Received, prompt: list[int], top: int, first: int = 0) -> None:
    """Every token from index `first` has the scripted values, once."""
    want = [logprobs_at(prompt, first + i, top, VOCAB) for i in range(len(got.tokens))]
    assert got.logprobs == [own for own, _, _ in want]
    assert got.top_ids == [token for _, ids, _ in want for token in ids]
    assert got.top == [value for _, _, values in want for value in values]
    assert got.finish is not None
    assert got.finish.cumulative_logprob == sum(got.logprobs)


async def test_each_token_has_its_own_and_the_likeliest(start) -> None:
    stack = await start(worker_info())
    got, other, plain = await asyncio.gather(
        collect(stack.stub.Generate(request([5, 6], 30, logprobs=3))),
        collect(stack.stub.Generate(request([7], 30, logprobs=0))),
        collect(stack.stub.Generate(request([8], 30))),
    )
    check(got, [5, 6], 3)
    check(other, [7], 0)
    assert (got.tokens, len(got.top)) == (expected([5, 6], 30), 90)
    tokenizer = stack.engine.tokenizer
    assert got.token_bytes == [tokenizer.token_bytes(token) for token in got.tokens]
    assert got.top_bytes == [tokenizer.token_bytes(token) for token in got.top_ids]
    assert plain.tokens == expected([8], 30)
    assert not plain.logprobs
    assert not plain.finish.HasField("cumulative_logprob")
    await stack.settle()


async def test_without_detokenize_there_are_no_bytes(start) -> None:
    stack = await start(worker_info())
    got = await collect(stack.stub.Generate(request([5], 9, logprobs=2, detokenize=False)))
    check(got, [5], 2)
    assert (got.token_bytes, got.top_bytes, got.text) == ([], [], "")


async def test_preemption_and_lost_workers_lose_and_repeat_none(start) -> None:
    # Both workers may be lost while they compute one sequence alone: the sequence must not fail. A
    # machine that pauses may make waits look long: no request must be refused for this reason.
    stack = await start(
        worker_info(num_blocks=20, num_slots=6, budget=16),
        worker_info(),
        max_retry_attempts=5,
        max_waiting_seconds=math.inf,
    )
    stack.workers[0].break_after = 60
    stack.workers[1].break_after = 25
    stack.workers[0].failing[7] = 2
    rng = random.Random(1)
    prompts = [[7, 7], *([rng.randrange(8, VOCAB) for _ in range(1 + n % 30)] for n in range(40))]
    wanted = [rng.choice([None, 0, 4]) for _ in prompts]
    wanted[0] = 4
    results = await asyncio.gather(
        *(
            collect(stack.stub.Generate(request(prompt, 40, logprobs=top)))
            for prompt, top in zip(prompts, wanted, strict=True)
        )
    )
    for prompt, top, got in zip(prompts, wanted, results, strict=True):
        assert got.tokens == expected(prompt, 40)
        if top is not None:
            check(got, prompt, top)
        else:
            assert not got.logprobs
    assert stack.engine.load().preemptions > 0
    await stack.wait_ready(2)
    await stack.settle()


async def test_tokens_after_the_end_have_none(start) -> None:
    stack = await start(worker_info())
    full = stack.engine.tokenizer.decode(expected([4, 4], 40))
    message = request([4, 4], 40, logprobs=2)
    message.stop.stop.append(full[10:13])
    got = await collect(stack.stub.Generate(message))
    assert got.finish.reason == pb.FINISH_REASON_STOP
    assert len(got.tokens) < 40
    check(got, [4, 4], 2)
    await stack.settle()


async def test_resume_sends_those_of_new_tokens(start) -> None:
    stack = await start(worker_info())
    message = request([8, 1], 25, logprobs=1, resume_token_ids=expected([8, 1], 10))
    got = await collect(stack.stub.Generate(message))
    assert len(got.tokens) == 15
    check(got, [8, 1], 1, first=10)


async def test_one_message_carries_those_of_many(start) -> None:
    stack = await start(worker_info())
    wanted = {number: (None, 0, 3)[number % 3] for number in range(24)}
    call = stack.multiplex()
    for number, top in wanted.items():
        submit = pb.Submit(
            stream=number, request=request([number, 2], 15, logprobs=top).SerializeToString()
        )
        await call.write(pb.MultiplexRequest(submit=submit))
    got = {number: Received() for number in wanted}
    while any(r.finish is None for r in got.values()):
        news = await call.read()
        ids = iter(unpack(news.candidate_ids).tolist())
        values = iter(unpack_floats(news.candidate_logprobs).tolist())
        streams = unpack_unsigned(news.streams).tolist()
        assert len(news.candidate_counts) in (0, len(streams))
        assert sum(news.candidate_sizes) == len(news.candidate_bytes)
        token_counts = news.token_counts or [1] * len(streams)
        for number, tokens, count in zip(
            streams, token_counts, news.candidate_counts, strict=False
        ):
            for _ in range(tokens if count else 0):
                got[number].tokens.append(next(ids))
                got[number].logprobs.append(next(values))
                got[number].top_ids += [next(ids) for _ in range(count - 1)]
                got[number].top += [next(values) for _ in range(count - 1)]
        assert (next(ids, None), next(values, None)) == (None, None)
        for end in news.finished:
            got[end.stream].finish = end.finish
    for number, top in wanted.items():
        if top is None:
            assert not got[number].tokens
        else:
            assert got[number].tokens == expected([number, 2], 15)
            check(got[number], [number, 2], top)
    call.cancel()
    await stack.settle()


async def test_too_many_logprobs_are_refused(start) -> None:
    stack = await start(worker_info())
    with pytest.raises(grpc.aio.AioRpcError, match="logprobs is 21; at most 20"):
        await collect(stack.stub.Generate(request([1], 5, logprobs=21)))
