"""Time per output token of many streams, alone and beside the prefill of long prompts.

    python -m benchmarks.gpu.long_prompt_beside --model DIR --load-format dummy \
        --max-model-len 131072 \
        [--long 120000] [--clients 32] [--requests 256] [--output FILE.jsonl]

Accepts every flag of `pagewire run`, and starts the same services. Clients send requests over HTTP
as in `benchmarks/serving.py`: 470 tokens in, 256 out, one after the other. A second run uses other
prompts, while another client sends one long prompt after the other, for one token each. The last
line is the ratio of the two p99 of TPOT.
"""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from benchmarks.serving import (
    HTTP_OUTPUT_TOKENS,
    HTTP_WORDS,
    TEMPERATURE,
    settings,
    vocab_size,
    with_tokenizer,
)

from pagewire.bench.http import run_plans, split
from pagewire.bench.http_load import LoadPlan
from pagewire.bench.latency import summarize, summary_text
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack
from pagewire.cli.settings.options import configured
from pagewire.models import served_name
from pagewire.objectives import Objectives

PROCESSES = 4  # that send requests


@configured(settings())
def main(
    values: dict[str, Any],
    *,
    long: Annotated[int, typer.Option(min=1, help="Tokens of a long prompt.")] = 120_000,
    clients: Annotated[int, typer.Option(min=1, help="Streams beside it.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Of all clients, in each run.")] = 256,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Serve a model, measure it, end."""
    name = served_name(values["model"], values["served_model_name"])
    vocabulary = vocab_size(Path(values["model"]))
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(values["model"], vocabulary, Path(folder))
        values = {**values, "model": model, "served_model_name": name}

        async def measure(stack: Stack) -> dict[str, Any]:
            assert stack.url is not None
            results: dict[str, Any] = {}
            for seed, kind in enumerate(("quiet", "beside")):
                plan = LoadPlan(
                    url=stack.url,
                    model=name,
                    requests=requests,
                    input_words=HTTP_WORDS,
                    output_tokens=HTTP_OUTPUT_TOKENS,
                    concurrency=clients,
                    temperature=TEMPERATURE,
                    seed=seed,
                )
                streams = asyncio.create_task(asyncio.to_thread(run_plans, split(plan, PROCESSES)))
                prefills: list[float] = []
                if kind == "beside":
                    prefills = await ask_until(streams, stack.url, name, long, vocabulary)
                results[kind] = summarize(await streams, Objectives())
                if results[kind]["failed"]:
                    raise CommandError(f"{kind}: {results[kind]['failed']} requests failed")
                print(f"{kind}\n{summary_text(results[kind])}", flush=True)
                if prefills:
                    results[kind]["prefill_s"] = statistics.median(prefills)
                    print(
                        f"  {len(prefills)} long prompts, each {results[kind]['prefill_s']:.2f} s"
                    )
            p99 = [results[kind]["tpot_ms"]["p99"] for kind in ("quiet", "beside")]
            results["ratio"] = p99[1] / p99[0]
            print(f"p99 of TPOT beside long prompts: {results['ratio']:.2f} of the quiet one")
            return results

        try:
            results = launch(full_stack, values, quiet, measure)
        except CommandError as error:
            raise SystemExit(str(error)) from error
    if output is not None and results is not None:
        write_rows(output, figures_of(results, name), command_line())


async def ask_until(
    streams: "asyncio.Task[Any]", url: str, model: str, length: int, vocabulary: int
) -> list[float]:
    """Returns the seconds of each prompt of `length` tokens, one after the other, while `streams`
    run. The last prompt may end after them."""
    rng = random.Random(0)
    taken = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not streams.done():
            prompt = [rng.randrange(vocabulary // 2, vocabulary) for _ in range(length)]
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            began = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise CommandError(f"{answer.status}: {await answer.text()}")
            taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    typer.run(main)
