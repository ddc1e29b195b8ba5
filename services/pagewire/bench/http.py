"""A load on an OpenAI-style server from several processes."""

import random
from dataclasses import replace

from pagewire.bench.http_load import LoadPlan, Timing, run_plan, words
from pagewire.cli.client import text_answer
from pagewire.cli.errors import CommandError

_SAMPLE_WORDS = 64


def split(plan: LoadPlan, processes: int) -> list[LoadPlan]:
    """Divides a plan into one for each process. The sums of requests, concurrency and rates equal
    those of the plan, and no part is empty."""
    processes = min(processes, plan.requests, plan.concurrency or processes)
    rate = None if plan.request_rate is None else plan.request_rate / processes
    return [
        replace(
            plan,
            requests=_share(plan.requests, processes, index),
            concurrency=plan.concurrency and _share(plan.concurrency, processes, index),
            request_rate=rate,
            seed=plan.seed * 1_000_003 + index,
        )
        for index in range(processes)
    ]


def run_plans(plans: list[LoadPlan]) -> list[Timing]:
    """Runs all plans at once, each in its own process."""
    # here, so that other commands start faster
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(plans), mp_context=context) as pool:
        return [timing for share in pool.map(run_plan, plans) for timing in share]


def _share(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


async def words_for(url: str, model: str, tokens: int) -> int:
    """The number of random words for a prompt of about `tokens` tokens, counted by the server."""
    sample = words(random.Random(0), _SAMPLE_WORDS)
    counts = [await _prompt_tokens(url, model, text) for text in (sample, f"{sample} {sample}")]
    per_word = (counts[1] - counts[0]) / _SAMPLE_WORDS
    overhead = 2 * counts[0] - counts[1]
    return max(1, round((tokens - overhead) / per_word))


async def _prompt_tokens(url: str, model: str, prompt: str) -> int:
    answer = text_answer(url, model, prompt, max_tokens=1, temperature=0)
    async for _ in answer:
        pass
    if not answer.prompt_tokens:
        raise CommandError(f"{url} sends no token counts in streams (stream_options.include_usage)")
    return answer.prompt_tokens
