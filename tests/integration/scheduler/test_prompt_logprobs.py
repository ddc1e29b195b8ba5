"""Log probabilities of prompts: complete, once, before the first token."""

import asyncio
import math
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from pagewire.packing import unpack, unpack_floats
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import VOCAB, expected, request, worker_info
from support.scripted.scripted_worker import prompt_logprob_at


async def collect(
    call: AsyncIterator[pb.GenerateResponse],
) -> tuple[pb.PromptOutput | None, list[int], pb.Finish]:
    """The prompt's message, the tokens and the end; asserts that the prompt came first."""
    prompt, tokens, finish = None, [], pb.Finish()
    async for response in call:
        if response.HasField("prompt"):
            assert prompt is None, "twice"
            assert not tokens, "after the first token"
            prompt = response.prompt
        tokens += response.token_ids
        if response.HasField("finish"):
            finish = response.finish
    return prompt, tokens, finish


def check(output: pb.PromptOutput | None, prompt: list[int], top: int) -> None:
    """Every token but the first has the scripted values, once."""
    assert output is not None
    assert unpack(output.token_ids).tolist() == prompt
    want = [prompt_logprob_at(prompt, at, top, VOCAB) for at in range(1, len(prompt))]
    assert unpack_floats(output.logprobs).tolist() == [own for own, *_ in want]
    assert unpack(output.ranks).tolist() == [rank for _, rank, *_ in want]
    top_ids = [token for _, _, ids, _ in want for token in ids]
    assert unpack(output.top_token_ids).tolist() == top_ids
    assert unpack_floats(output.top_logprobs).tolist() == [v for *_, values in want for v in values]


def pieces(output: pb.PromptOutput) -> dict[int, bytes]:
    found, at = {}, 0
    ids = unpack(output.distinct_ids).tolist()
    for token, size in zip(ids, output.distinct_sizes, strict=True):
        found[token] = output.distinct_bytes[at : at + size]
        at += size
    assert at == len(output.distinct_bytes)
    return found


async def test_a_prompt_in_chunks_has_those_of_every_token_but_the_first(start) -> None:
    stack = await start(worker_info(budget=10))
    long, short = list(range(20, 65)), [9]
    (of_long, tokens, finish), (of_short, *_), (nothing, *_) = await asyncio.gather(
        collect(stack.stub.Generate(request(long, 8, prompt_logprobs=3))),
        collect(stack.stub.Generate(request(short, 8, prompt_logprobs=2, prompt_text=True))),
        collect(stack.stub.Generate(request([4, 5], 8))),
    )
    assert tokens == expected(long, 8)
    check(of_long, long, 3)
    check(of_short, short, 2)
    assert nothing is None
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (45, 8)
    tokenizer = stack.engine.tokenizer
    named = {*long, *unpack(of_long.top_token_ids).tolist()}
    assert pieces(of_long) == {token: tokenizer.token_bytes(token) for token in named}
    assert (of_long.text, of_short.text) == ("", tokenizer.decode([9], False))
    await stack.settle()


async def test_without_tokens_the_prompt_is_computed_and_nothing_generated(start) -> None:
    stack = await start(worker_info(budget=10))
    prompt = list(range(20, 50))
    output, tokens, finish = await collect(
        stack.stub.Generate(request(prompt, 0, prompt_logprobs=1, detokenize=False))
    )
    check(output, prompt, 1)
    assert (tokens, list(output.distinct_sizes)) == ([], [])
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (30, 0)
    steps = stack.workers[0].steps
    output, tokens, finish = await collect(
        stack.stub.Generate(request(prompt, 0, prompt_text=True))
    )
    assert output.text == stack.engine.tokenizer.decode(prompt, False)
    assert (tokens, finish.reason) == ([], pb.FINISH_REASON_LENGTH)
    assert stack.workers[0].steps == steps, "text alone needs no worker"
    await stack.settle()


async def test_the_prefix_cache_is_written_and_not_read(start) -> None:
    stack = await start(worker_info())
    prompt = list(range(20, 60))
    *_, first = await collect(stack.stub.Generate(request(prompt, 4)))
    output, _, scored = await collect(stack.stub.Generate(request(prompt, 4, prompt_logprobs=1)))
    *_, after = await collect(stack.stub.Generate(request(prompt, 4)))
    check(output, prompt, 1)
    cached = [finish.usage.cached_tokens for finish in (first, scored, after)]
    assert cached == [0, 0, 36]
    other = list(range(100, 140))
    await collect(stack.stub.Generate(request(other, 0, prompt_logprobs=0)))
    *_, shared = await collect(stack.stub.Generate(request(other, 4)))
    assert shared.usage.cached_tokens == 36
    await stack.settle()


async def test_preemption_and_lost_workers_lose_and_repeat_none(start) -> None:
    stack = await start(
        worker_info(num_blocks=20, num_slots=6, budget=5),
        worker_info(budget=6),
        max_retry_attempts=5,
        max_waiting_seconds=math.inf,
    )
    stack.workers[0].break_after = 60
    stack.workers[1].break_after = 26
    stack.workers[0].failing[7] = 2
    rng = random.Random(1)
    lengths = [1 + 7 * number % 36 for number in range(50)]
    prompts = [[7, 7], *([rng.randrange(8, VOCAB) for _ in range(length)] for length in lengths)]
    wanted = [rng.choice([None, 0, 4]) for _ in prompts]
    counts = [rng.choice([0, 1, 40]) if top is not None else 40 for top in wanted]
    results = await asyncio.gather(
        *(
            collect(stack.stub.Generate(request(prompt, count, prompt_logprobs=top)))
            for prompt, count, top in zip(prompts, counts, wanted, strict=True)
        )
    )
    for prompt, count, top, (output, tokens, _) in zip(
        prompts, counts, wanted, results, strict=True
    ):
        assert tokens == expected(prompt, count)
        if top is not None:
            check(output, prompt, top)
        else:
            assert output is None
    assert stack.engine.load().preemptions > 0
    await stack.wait_ready(2)
    await stack.settle()


async def test_what_a_lost_worker_has_sent_is_kept(start) -> None:
    stack = await start(worker_info(budget=8), run_ahead=1)
    (worker,) = stack.workers
    worker.step_seconds = 0.01  # for shorter steps more are sent ahead
    worker.break_after = 4  # three chunks are answered, the fourth is lost
    prompt = list(range(20, 60))
    output, tokens, _ = await collect(stack.stub.Generate(request(prompt, 3, prompt_logprobs=2)))
    check(output, prompt, 2)
    assert tokens == expected(prompt, 3)
    assert worker.scored_before == 1
    assert worker.scored == 32 + 15
    await stack.settle()


async def test_a_continuation_gets_those_of_the_prompt_again(start) -> None:
    stack = await start(worker_info(budget=8))
    prompt = list(range(30, 50))
    message = request(prompt, 25, prompt_logprobs=1, resume_token_ids=expected(prompt, 10))
    output, tokens, _ = await collect(stack.stub.Generate(message))
    check(output, prompt, 1)
    assert tokens == expected(prompt, 25)[10:]
    message.stop.max_tokens = 10
    with pytest.raises(grpc.aio.AioRpcError, match="leave prompt_logprobs out"):
        await collect(stack.stub.Generate(message))
    await stack.settle()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; at most 20"),
        ({"prompt_logprobs": 5}, "has 54 log probabilities with 5 of the likeliest .* at most 50"),
        ({"prompt_logprobs": 1, "beam_search": pb.BeamSearch(width=2)}, "prompt_logprobs cannot"),
        ({"prompt_text": True, "beam_search": pb.BeamSearch(width=2)}, "prompt_text cannot"),
    ],
)
async def test_what_cannot_be_given_is_refused(start, fields, reason) -> None:
    stack = await start(worker_info(), max_prompt_logprobs=50)
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
        await collect(stack.stub.Generate(request(list(range(10)), 5, **fields)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stack.settle()
