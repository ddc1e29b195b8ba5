"""Serve a model and measure it: all requests at once over gRPC, and streams over HTTP.

    python benchmarks/serving.py --model DIR --load-format dummy --num-slots 512 [--output FILE]
    python benchmarks/serving.py --model DIR --load-format dummy --num-slots 512 \
        --worker-max-num-batched-tokens 16384 --only prefill_heavy

Accepts every flag of `pagewire run`, starts the same services, and runs the workloads of README's
figures. Each workload runs `--rounds` times with other token ids, so that rounds share no cached
blocks; the best round counts. A DIR without a tokenizer is served with a tokenizer of the size of
the model's vocabulary. Figures are tokens a second: of outputs, and of prompts and outputs together
for `prefill_heavy`.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.bench.http import run_plans, split
from pagewire.bench.http_load import WORDS, LoadPlan
from pagewire.bench.latency import summarize
from pagewire.bench.offline import OfflineSampling, Request, submit_all, without_wait_limit
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, stack_settings
from pagewire.cli.settings.options import configured
from pagewire.cli.settings.settings import Setting
from pagewire.models import served_name
from pagewire.objectives import Objectives
from pagewire.rpc.credentials import SCHEDULER_TOKEN, read_token

# Token ids in use, if the vocabulary is large enough: control tokens are below or above.
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


def long_decode(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """16 requests of 8,192 tokens in and 512 out."""
    return [Request(prompt(8192), 512) for _ in range(16)]


def saturated(prompt: Prompt, _rng: random.Random) -> list[Request]:
    """1,024 requests of 1,024 tokens in and out."""
    return [Request(prompt(1024), 1024) for _ in range(1024)]


USUAL = (mixed256, fixed512, prefill_heavy, shared_prefix, single)
WORKLOADS = {f.__name__: f for f in (*USUAL, long_decode, saturated)}
# The prompts and lengths of README's figures.
SEEDS = {name: seed for seed, name in enumerate(WORKLOADS)}
SHIFT = 7919  # of all ids from one round to the next
LINES = (*WORKLOADS, *(f"http-{clients}" for clients in HTTP_REQUESTS))
NOT_DEFAULT = (long_decode.__name__, saturated.__name__)
DEFAULT_LINES = ",".join(line for line in LINES if line not in NOT_DEFAULT)


def settings() -> dict[str, Setting]:
    """Those of `pagewire run`, without a limit of the wait, and on free ports by default."""
    found = without_wait_limit(stack_settings())
    return found | {name: replace(found[name], default=0) for name in ("port", "grpc_port")}


@configured(settings())
def main(
    values: dict[str, Any],
    *,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(LINES)}.")] = DEFAULT_LINES,
    rounds: Annotated[int, typer.Option(min=1, help="How often each workload runs.")] = 2,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Serve a model, measure it, end."""
    lines = only.split(",")
    unknown = set(lines) - set(LINES)
    if unknown:
        raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(LINES)}")
    name = served_name(values["model"], values["served_model_name"])
    vocabulary = vocab_size(Path(values["model"]))
    ids = range(min(FIRST_ID, vocabulary // 2), min(END_ID, vocabulary))
    token = read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(values["model"], vocabulary, Path(folder))
        values = {**values, "model": model, "served_model_name": name}
        started = time.perf_counter()

        async def measure(stack: Stack) -> dict[str, Any]:
            results: dict[str, Any] = {}
            results["seconds_to_ready"] = time.perf_counter() - started
            print(f"ready after {results['seconds_to_ready']:.1f} s", flush=True)
            for line in lines:
                if line in WORKLOADS:
                    runs = [await offline(line, n, ids, stack, token) for n in range(rounds)]
                else:
                    runs = [await http(line, n, name, stack) for n in range(rounds)]
                results[line] = best = best_of(runs)
                print(f"{line:<14} {best['tokens_per_second']:12,.1f} tokens/s", flush=True)
            return results

        try:
            results = launch(full_stack, values, quiet, measure)
        except CommandError as error:
            raise SystemExit(str(error)) from error
    if output is not None and results is not None:
        write_rows(output, figures_of(results, name), command_line())


def vocab_size(model: Path) -> int:
    """The vocabulary size of the model in a folder."""
    config = model / "config.json"
    if not config.is_file():
        raise SystemExit(f"--model: {config} is not there")
    return int(json.loads(config.read_text())["vocab_size"])


def with_tokenizer(model: str, vocabulary: int, folder: Path) -> str:
    """The model's folder; if it has no tokenizer, `folder` with its files and a new one."""
    if (Path(model) / "tokenizer.json").is_file():
        return model
    for path in Path(model).iterdir():
        (folder / path.name).symlink_to(path.resolve())
    tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    return str(folder)


def tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer with `size` entries and one token for each word of the load."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in WORDS)]
    if size < len(entries):
        raise SystemExit(f"vocab_size is {size}: add a tokenizer.json, or make it {len(entries)}")
    entries += [f"Ġ{number}" for number in range(size - len(entries))]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the highest rate, with the rates of all runs."""
    rates = [run["tokens_per_second"] for run in runs]
    best = runs[rates.index(max(rates))]
    return {**best, "tokens_per_second_by_round": rates}


async def offline(
    line: str, number: int, ids: range, stack: Stack, token: str | None
) -> dict[str, Any]:
    """Sends all requests at once over gRPC; CommandError if a request failed."""
    sampling = OfflineSampling(TEMPERATURE, ignore_eos=True, detokenize=False)
    batch = requests(line, number, ids)
    result = await submit_all(stack.grpc_address, batch, sampling, token)
    if result.first_error is not None:
        raise CommandError(f"{line}: {result.first_error}")
    rate = result.total_rate if line == "prefill_heavy" else result.output_rate
    return {"tokens_per_second": rate, **asdict(result)}


def load_plans(clients: int, number: int, url: str, model: str) -> list[LoadPlan]:
    """The plan of each client process.

    No two numbers of clients, and no two rounds, share a prompt, which would be cached.
    """
    plan = LoadPlan(
        url=url,
        model=model,
        requests=HTTP_REQUESTS[clients],
        input_words=HTTP_WORDS,
        output_tokens=HTTP_OUTPUT_TOKENS,
        concurrency=clients,
        temperature=TEMPERATURE,
        seed=number * len(HTTP_REQUESTS) + list(HTTP_REQUESTS).index(clients),
    )
    return split(plan, 4)


async def http(line: str, number: int, model: str, stack: Stack) -> dict[str, Any]:
    """Runs streaming clients, each with one request after the other; as `offline`."""
    assert stack.url is not None
    plans = load_plans(int(line.removeprefix("http-")), number, stack.url, model)
    timings = await asyncio.to_thread(run_plans, plans)
    for timing in timings:
        if timing.error is not None:
            raise CommandError(f"{line}: {timing.error}")
    result = summarize(timings, Objectives())
    return {"tokens_per_second": result["output_tokens_per_second"], **result}


def requests(workload: str, number: int, ids: range) -> list[Request]:
    """Returns the same lengths in every round; each round shifts all ids."""
    rng = random.Random(SEEDS[workload])

    def prompt(length: int) -> list[int]:
        return [ids[(rng.randrange(len(ids)) + number * SHIFT) % len(ids)] for _ in range(length)]

    return WORKLOADS[workload](prompt, rng)


if __name__ == "__main__":
    typer.run(main)
