"""`pagewire bench http`: streaming load on any OpenAI-style server."""

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagewire.bench.http_load import LoadPlan, Timing, run_plan, words
from pagewire.bench.latency import summarize, summary_text
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.client import DEFAULT_URL, served_models, text_answer
from pagewire.cli.errors import CommandError
from pagewire.objectives import Objectives

_DEFAULT_CONCURRENCY = 16
_SAMPLE_WORDS = 64


def http(
    url: Annotated[str, typer.Option(help="The server's URL.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; by default the first one served.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests under way at any time (closed loop); default 16."),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Instead: requests a second with Poisson arrivals."),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 128,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, about.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate output-len tokens in any case.")
    ] = True,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Load processes; by default 4, or fewer on a smaller machine."),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput counts requests with at most this TTFT.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Goodput counts requests with at most this TPOT.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of prompts and arrivals; run again, it finds its prompts cached.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Measure a running server: throughput, TTFT, TPOT, ITL and end-to-end latency."""
    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("give --concurrency or --request-rate, not both")
    if request_rate is None:
        concurrency = concurrency or _DEFAULT_CONCURRENCY
    model = model or asyncio.run(_first_model(url))
    plan = LoadPlan(
        url=url,
        model=model,
        requests=num_requests,
        input_words=asyncio.run(_words_for(url, model, input_len)),
        output_tokens=output_len,
        concurrency=concurrency,
        request_rate=request_rate,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    timings = run_plans(split(plan, processes or min(4, os.cpu_count() or 1)))
    summary = summarize(timings, Objectives(slo_ttft_ms, slo_tpot_ms))
    print(f"{model} at {url}\n{summary_text(summary)}")
    if output is not None:
        write_rows(output, figures_of(summary, model), command_line())
    failed = [timing.error for timing in timings if timing.error]
    if failed:
        raise CommandError(f"{len(failed)} requests failed; the first: {failed[0]}")


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


async def _first_model(url: str) -> str:
    models = await served_models(url)
    if not models:
        raise CommandError(f"no model is served at {url}; start it with `pagewire run`")
    return models[0]


async def _words_for(url: str, model: str, tokens: int) -> int:
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
