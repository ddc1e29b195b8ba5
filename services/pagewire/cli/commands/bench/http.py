"""`pagewire bench http`: streaming load on any OpenAI-style server."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from pagewire.bench.http import run_plans, split, words_for
from pagewire.bench.http_load import LoadPlan
from pagewire.bench.latency import summarize, summary_text
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.client import DEFAULT_URL, first_model, server_url
from pagewire.cli.errors import CommandError
from pagewire.objectives import Objectives

_DEFAULT_CONCURRENCY = 16


def http(
    url: Annotated[str, typer.Option(help="The server's URL.")] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model; by default the first one that the server lists."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests that are open at any time (closed loop); by default 16."
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Requests a second with Poisson arrivals, instead of --concurrency."
        ),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests in total.")] = 128,
    input_len: Annotated[int, typer.Option(min=1, help="Approximate tokens of a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate output-len tokens, even after an end-of-sequence token.")
    ] = True,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that send requests; by default 4, at most one a core."),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option(help="Longest TTFT, in milliseconds, of a request that counts as goodput."),
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option(help="Longest TPOT, in milliseconds, of a request that counts as goodput."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of prompts and arrivals. With the same seed, a second run finds its "
            "prompts cached."
        ),
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Measure throughput, TTFT, TPOT, ITL and end-to-end latency of a running server."""
    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("give --concurrency or --request-rate, not both")
    if request_rate is None:
        concurrency = concurrency or _DEFAULT_CONCURRENCY
    url = server_url(url)
    model = model or asyncio.run(first_model(url))
    plan = LoadPlan(
        url=url,
        model=model,
        requests=num_requests,
        input_words=asyncio.run(words_for(url, model, input_len)),
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
