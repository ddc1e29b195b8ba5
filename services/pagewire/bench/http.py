"""A measurement of an OpenAI-style server with several load processes."""

import random
from dataclasses import replace

from pagewire.bench.http_load import LoadPlan, Timing, run_plan, words
from pagewire.cli.client import text_answer
from pagewire.cli.errors import CommandError

_SAMPLE_WORDS = 64


def split(plan: LoadPlan, processes: int) -> list[LoadPlan]:
    """Shares of a plan whose requests, lanes and rates add up to it; none is empty."""
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
    """Runs each plan in a process of its own, all at once."""
    # Here, so that commands that measure nothing start faster.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(plans), mp_context=context) as pool:
        return [timing for share in pool.map(run_plan, plans) for timing in share]


def _share(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


async def words_for(url: str, model: str, tokens: int) -> int:
    """How many random words make a prompt of about so many tokens, by asking the server."""
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
        raise CommandError(f"{url} does not tell token counts in streams (include_usage)")
    return answer.prompt_tokens
