"""Throughput of `pagewire.llm.LLM` beside `pagewire bench offline`, and the start-up time of LLM.

Each round has requests of its own, given at once: first to `pagewire bench offline`, then to `LLM`.
Each side starts its own worker and scheduler for each round. Every figure is the median of the
rounds; the ratio is that of the two sides of one round. Ends with status 1 when LLM has less than
--least of the other's throughput.

    python benchmarks/python_api.py --rounds 7 --output benchmarks/results/python-api-cpu.jsonl
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pagewire.bench.offline import OfflineSampling, Request, measure_offline, without_wait_limit
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.cli.launch.stack import control_settings
from pagewire.llm import LLM, SamplingParams

# Ids that the embedded model's vocabulary has, without special tokens.
_IDS = range(300, 2000)


def requests_of(round_number: int, options: argparse.Namespace) -> list[Request]:
    """The requests of a round, which share no prefix with others."""
    rng = random.Random(round_number)
    return [
        Request([rng.choice(_IDS) for _ in range(options.prompt_tokens)], options.max_tokens)
        for _ in range(options.requests)
    ]


def bench_offline(requests: list[Request], settings: dict[str, Any]) -> float:
    """Output tokens a second of `pagewire bench offline`."""
    usual = without_wait_limit(control_settings())
    values = {name: setting.default for name, setting in usual.items()}
    values |= {"grpc_port": 0, "log_level": "warning", **settings}
    measured = measure_offline(values, requests, OfflineSampling(0.0, True, True))
    if measured is None:
        sys.exit(130)
    _, result = measured
    if result.failed:
        sys.exit(f"{result.failed} requests failed; the first: {result.first_error}")
    return result.output_rate


def python_api(requests: list[Request], settings: dict[str, Any]) -> tuple[float, float]:
    """Seconds to start, and output tokens a second of `LLM`."""
    started = time.perf_counter()
    with LLM(**settings) as llm:
        ready = time.perf_counter()
        prompts = [request.prompt_token_ids for request in requests]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=requests[0].max_tokens)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begun
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return ready - started, tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--least", type=float, default=0.0, help="smallest ratio")
    parser.add_argument("--output", type=Path, help="file for the figures, JSON lines")
    options = parser.parse_args()
    settings = {"model": options.model}
    others, ours, starts = [], [], []
    for number in range(options.rounds):
        requests = requests_of(number, options)
        others.append(bench_offline(requests, settings))
        start, rate = python_api(requests, settings)
        ours.append(rate)
        starts.append(start)
        print(
            f"round {number}: offline {others[-1]:,.0f} tokens/s, LLM {rate:,.0f} tokens/s, "
            f"LLM ready in {start:.2f} s",
            flush=True,
        )
    ratio = statistics.median(our / other for our, other in zip(ours, others, strict=True))
    figures = [
        Figure("offline.output_rate", statistics.median(others), "tokens/s"),
        Figure("llm.output_rate", statistics.median(ours), "tokens/s"),
        Figure("llm.ratio", ratio, "ratio"),
        Figure("llm.start", statistics.median(starts), "s"),
    ]
    print("\n".join(f"{figure.name:<20} {figure.value:10,.2f} {figure.unit}" for figure in figures))
    if options.output is not None:
        write_rows(options.output, figures, command_line())
    if ratio < options.least:
        sys.exit(f"LLM has {ratio:.2f} of the throughput; at least {options.least} is wanted")


if __name__ == "__main__":
    main()
