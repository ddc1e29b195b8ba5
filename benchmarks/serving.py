"""Serve a model and measure it: all requests at once over gRPC, and streams over HTTP.

    python benchmarks/serving.py --model DIR --load-format dummy --num-slots 512 [--output FILE]
    python benchmarks/serving.py --model DIR --load-format dummy --num-slots 512 \
        --worker-max-num-batched-tokens 16384 --only prefill_heavy

Takes every flag of `pagewire run`, starts what that starts, and runs the workloads that README's
figures come from, `--rounds` times each with other token ids, so that nothing of one round is
cached for the next; the best round counts. A DIR without a tokenizer is served with one that has as
many entries as the model's vocabulary. Figures are tokens a second: of outputs, and of prompts and
outputs together for `prefill_heavy`.
"""

import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.cli.bench_http import run_plans, split
from pagewire.cli.bench_offline import Request, Sampling, submit_all
from pagewire.cli.errors import CommandError
from pagewire.cli.http_load import WORDS, LoadPlan
from pagewire.cli.latency import Objectives, summarize
from pagewire.cli.launch import launch, quiet
from pagewire.cli.options import configured
from pagewire.cli.results import write_json
from pagewire.cli.stack import Stack, full_stack, stack_settings
from pagewire.models import served_name

# Where a vocabulary is as large: below it are the control tokens of some, above it those of others.
FIRST_ID, END_ID = 1000, 100_000
TEMPERATURE = 0.6
HTTP_WORDS, HTTP_OUTPUT_TOKENS = 470, 256
HTTP_REQUESTS = {1: 8, 32: 512, 256: 1024}  # by the number of clients

Prompt = Callable[[int], list[int]]


def mixed256(prompt: Prompt, rng: random.Random) -> list[Request]:
    """256 requests of 100 to 1,024 tokens in and out."""
    return [Request(prompt(rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]


def fixed512(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """512 requests of 512 tokens in and out."""
    return [Request(prompt(512), 512) for _ in range(512)]


def prefill_heavy(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """256 requests of 2,000 tokens in and 32 out."""
    return [Request(prompt(2000), 32) for _ in range(256)]


def shared_prefix(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """512 requests of 128 tokens behind one of four prefixes of 2,048, and 128 out."""
    prefixes = [prompt(2048) for _ in range(4)]
    return [Request(prefixes[i % 4] + prompt(128), 128) for i in range(512)]


def single(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """One request of 128 tokens in and 512 out."""
    return [Request(prompt(128), 512)]


WORKLOADS = {f.__name__: f for f in (mixed256, fixed512, prefill_heavy, shared_prefix, single)}
# The prompts and lengths that README's figures are of.
SEEDS = {name: seed for seed, name in enumerate(WORKLOADS)}
SHIFT = 7919  # of all ids from one round to the next
LINES = (*WORKLOADS, *(f"http-{clients}" for clients in HTTP_REQUESTS))


def settings() -> dict[str, Any]:
    """Those of `pagewire run`; requests wait for as long as it takes."""
    found = stack_settings()
    waiting = replace(found["max_waiting_seconds"], default=math.inf)
    return {**found, "max_waiting_seconds": waiting}


@configured(settings())
def main(
    values: dict[str, Any],
    *,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(LINES)}.")] = ",".join(LINES),
    rounds: Annotated[int, typer.Option(min=1, help="How often each workload runs.")] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Serve a model, measure it, end."""
    lines = only.split(",")
    unknown = set(lines) - set(LINES)
    if unknown:
        raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(LINES)}")
    with tempfile.TemporaryDirectory() as folder:
        name = served_name(values["model"], values["served_model_name"])
        model = with_tokenizer(values["model"], Path(folder))
        values = {**values, "model": model, "served_model_name": name, "port": 0, "grpc_port": 0}
        vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        ids = range(min(FIRST_ID, vocabulary // 2), min(END_ID, vocabulary))
        started = time.perf_counter()

        async def measure(stack: Stack) -> dict[str, Any]:
            results: dict[str, Any] = {"model": name}
            results["seconds_to_ready"] = time.perf_counter() - started
            print(f"ready after {results['seconds_to_ready']:.1f} s", flush=True)
            for line in lines:
                results[line] = best = await best_of(rounds, line, stack, ids, name)
                print(f"{line:<14} {best['rate']:12,.1f} tokens/s", flush=True)
            return results

        try:
            results = launch(full_stack, values, quiet, measure)
        except CommandError as error:
            raise SystemExit(str(error)) from error
    if output is not None and results is not None:
        write_json(output, results)


def with_tokenizer(model: str, folder: Path) -> str:
    """The model's folder, or if that has no tokenizer, `folder` with its files and one."""
    config = Path(model) / "config.json"
    if not config.is_file():
        raise SystemExit(f"--model: {config} is not there")
    if (Path(model) / "tokenizer.json").is_file():
        return model
    for path in Path(model).iterdir():
        (folder / path.name).symlink_to(path.resolve())
    tokenizer(json.loads(config.read_text())["vocab_size"]).save(str(folder / "tokenizer.json"))
    return str(folder)


def tokenizer(size: int) -> Tokenizer:
    """Byte-level, with `size` entries, among them a whole token for each word of the load."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in WORDS)]
    if size < len(entries):
        raise SystemExit(f"vocab_size is {size}: add a tokenizer.json, or make it {len(entries)}")
    entries += [f"Ġ{number}" for number in range(size - len(entries))]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made


async def best_of(rounds: int, line: str, stack: Stack, ids: range, model: str) -> dict[str, Any]:
    """The round with the highest rate, and the rates of all; CommandError if a request failed."""
    if line in WORKLOADS:
        results = [await offline(line, requests(line, n, ids), stack) for n in range(rounds)]
    else:
        results = [
            await http(int(line.removeprefix("http-")), n, stack, model) for n in range(rounds)
        ]
    best = max(results, key=lambda result: result["rate"])
    return {**best, "rates": [result["rate"] for result in results]}


async def offline(line: str, batch: list[Request], stack: Stack) -> dict[str, Any]:
    """All at once over gRPC."""
    sampling = Sampling(TEMPERATURE, ignore_eos=True, detokenize=False)
    result = await submit_all(stack.grpc_address, batch, sampling)
    if result.first_error is not None:
        raise CommandError(f"{line}: {result.first_error}")
    rate = result.total_rate if line == "prefill_heavy" else result.output_rate
    return {"rate": rate, **asdict(result)}


async def http(clients: int, number: int, stack: Stack, model: str) -> dict[str, Any]:
    """Streaming clients, each of which asks again when it has its answer."""
    assert stack.url is not None
    plan = LoadPlan(
        url=stack.url,
        model=model,
        requests=HTTP_REQUESTS[clients],
        input_words=HTTP_WORDS,
        output_tokens=HTTP_OUTPUT_TOKENS,
        concurrency=clients,
        temperature=TEMPERATURE,
        seed=number + 1,
    )
    timings = await asyncio.to_thread(run_plans, split(plan, 4))
    for timing in timings:
        if timing.error is not None:
            raise CommandError(f"{clients} clients: {timing.error}")
    result = summarize(timings, Objectives())
    return {"rate": result["output_tokens_per_second"], **result}


def requests(workload: str, number: int, ids: range) -> list[Request]:
    """The same lengths in every round, and all ids shifted from one to the next."""
    rng = random.Random(SEEDS[workload])

    def prompt(length: int) -> list[int]:
        return [ids[(rng.randrange(len(ids)) + number * SHIFT) % len(ids)] for _ in range(length)]

    return WORKLOADS[workload](prompt, rng)


if __name__ == "__main__":
    typer.run(main)
