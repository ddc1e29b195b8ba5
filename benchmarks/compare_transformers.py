"""Pagewire over HTTP against transformers, on this machine, with the same prompts.

Pagewire runs as separate processes, gets all requests at once through its HTTP API, and streams.
transformers generates for the same prompts one after another in this process, once with one thread
and once with all cores; the faster run counts. Both are greedy and generate exactly the same number
of tokens for each prompt. Each round has its own prompts, so that no prefix cache helps. The figure
of a side is its median round. Ends with status 1 when Pagewire is not at least --least times as
fast.

    python benchmarks/compare_transformers.py --output benchmarks/results/cpu-embedded.jsonl
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.bench.http_load import LoadPlan, completion_body, send, words
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.client import served_models
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, temporary_stack
from pagewire.models import resolve_model, served_name


@dataclass(frozen=True, slots=True)
class Side:
    """The results of one engine: tokens of all rounds, and tokens a second by round."""

    prompt_tokens: int
    output_tokens: int
    rates: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def measure_pagewire(model: str, rounds: list[list[str]], max_tokens: int) -> Side:
    """Each round's prompts all at once through the gateway."""

    async def measure(stack: Stack) -> Side:
        assert stack.url is not None
        names = await served_models(stack.url)
        assert names  # the server is ready
        return await _drive(stack.url, names[0], rounds, max_tokens)

    side = launch(full_stack, temporary_stack(model=model), quiet, measure)
    if side is None:
        sys.exit(130)
    return side


async def _drive(url: str, model: str, rounds: list[list[str]], max_tokens: int) -> Side:
    import aiohttp

    plan = LoadPlan(url=url, model=model, output_tokens=max_tokens)
    rates, prompt_tokens, output_tokens = [], 0, 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: str) -> Any:
            return await send(session, f"{url}/v1/completions", completion_body(plan, prompt))

        await one("warm up")
        for prompts in rounds:
            started = time.perf_counter()
            timings = await asyncio.gather(*map(one, prompts))
            seconds = time.perf_counter() - started
            errors = [timing.error for timing in timings if timing.error]
            if errors:
                sys.exit(f"{len(errors)} requests failed; the first: {errors[0]}")
            tokens = sum(timing.output_tokens for timing in timings)
            rates.append(tokens / seconds)
            output_tokens += tokens
            prompt_tokens += sum(timing.prompt_tokens for timing in timings)
    return Side(prompt_tokens, output_tokens, rates)


def measure_transformers(
    model: str, rounds: list[list[str]], max_tokens: int, threads: int
) -> Side:
    """Each round's prompts one after another, with `threads` torch threads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    folder = resolve_model(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: str) -> tuple[int, int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        output = decoder.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        return length, output.shape[1] - length

    rates, prompt_tokens, output_tokens = [], 0, 0
    with torch.inference_mode():
        generate("warm up")
        for prompts in rounds:
            started = time.perf_counter()
            counts = [generate(prompt) for prompt in prompts]
            seconds = time.perf_counter() - started
            tokens = sum(count for _, count in counts)
            rates.append(tokens / seconds)
            output_tokens += tokens
            prompt_tokens += sum(length for length, _ in counts)
    return Side(prompt_tokens, output_tokens, rates)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--prompt-words", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=float, default=2.0, help="ratio to reach")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rng = random.Random(0)
    rounds = [
        [words(rng, arguments.prompt_words) for _ in range(arguments.requests)]
        for _ in range(arguments.rounds)
    ]
    shape = f"{arguments.requests} requests, {arguments.max_tokens} tokens each, greedy"
    print(f"{served_name(arguments.model, None)}: {shape}", flush=True)
    pagewire = measure_pagewire(arguments.model, rounds, arguments.max_tokens)
    print(f"  Pagewire, HTTP, all at once      {pagewire.rate:10.1f} tokens/s", flush=True)
    sides = {
        threads: measure_transformers(arguments.model, rounds, arguments.max_tokens, threads)
        for threads in sorted({1, os.cpu_count() or 1})
    }
    threads = max(sides, key=lambda count: sides[count].rate)
    baseline = sides[threads]
    print(f"  transformers, one after another  {baseline.rate:10.1f} tokens/s ({threads} threads)")
    if pagewire.prompt_tokens != baseline.prompt_tokens:
        sys.exit(
            f"the sides did not get the same prompts: {pagewire.prompt_tokens} prompt tokens "
            f"against {baseline.prompt_tokens}"
        )
    if pagewire.output_tokens != baseline.output_tokens:
        sys.exit(
            f"the sides did not generate equally much: {pagewire.output_tokens} tokens against "
            f"{baseline.output_tokens}"
        )
    ratio = pagewire.rate / baseline.rate
    print(f"  ratio                            {ratio:10.2f} (at least {arguments.least:g} wanted)")
    if arguments.output is not None:
        result = {**_result(pagewire, baseline, ratio), "transformers_threads": threads}
        figures = figures_of(result, served_name(arguments.model, None))
        write_rows(arguments.output, figures, command_line())
    sys.exit(0 if ratio >= arguments.least else 1)


def _result(pagewire: Side, baseline: Side, ratio: float) -> dict[str, Any]:
    return {
        "prompt_tokens": pagewire.prompt_tokens,
        "output_tokens": pagewire.output_tokens,
        "pagewire_tokens_per_second": pagewire.rate,
        "transformers_tokens_per_second": baseline.rate,
        "ratio": ratio,
        "pagewire_tokens_per_second_by_round": pagewire.rates,
        "transformers_tokens_per_second_by_round": baseline.rates,
    }


if __name__ == "__main__":
    main()
