"""Throughput of `pagewire.llm.LLM` beside `pagewire bench offline`, and the start-up time of LLM.

Both use the same worker and scheduler, one after the other in each round; the order alternates.
Each batch has its own requests, sent at once. The ratio is the median over the rounds. Ends
with status 1 when LLM has less than --least of the other's throughput.

    python benchmarks/python_api.py --output benchmarks/results/python-api-cpu.jsonl
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

from pagewire.bench.offline import OfflineSampling, Request, submit_all
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.llm import LLM, SamplingParams

# Ids that the embedded model's vocabulary has, without special tokens.
_IDS = range(300, 2000)


def requests_of(batch: int, options: argparse.Namespace) -> list[Request]:
    """The requests of a batch, which share no prefix with others."""
    rng = random.Random(batch)
    return [
        Request([rng.choice(_IDS) for _ in range(options.prompt_tokens)], options.max_tokens)
        for _ in range(options.requests)
    ]


def bench_offline(llm: LLM, requests: list[Request]) -> float:
    """Output tokens a second of `pagewire bench offline`."""
    address = llm._stack.connected().address
    result = asyncio.run(submit_all(address, requests, OfflineSampling(0.0, True, True)))
    if result.failed:
        sys.exit(f"{result.failed} requests failed; the first: {result.first_error}")
    return result.output_rate


def python_api(llm: LLM, requests: list[Request]) -> float:
    """Output tokens a second of `LLM.generate`, from the call to its outputs."""
    prompts = [request.prompt_token_ids for request in requests]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=requests[0].max_tokens)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - begun
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--least", type=float, default=0.0, help="smallest ratio")
    parser.add_argument("--output", type=Path, help="file for the figures, JSON lines")
    options = parser.parse_args()
    started = time.perf_counter()
    offline: list[float] = []
    ours: list[float] = []
    with LLM(options.model) as llm:
        start = time.perf_counter() - started
        python_api(llm, requests_of(-1, options))
        for number in range(options.rounds):
            sides = [(offline, bench_offline), (ours, python_api)]
            for turn, (rates, measure) in enumerate(sides[:: 1 if number % 2 else -1]):
                rates.append(measure(llm, requests_of(2 * number + turn, options)))
    ratio = statistics.median(our / other for our, other in zip(ours, offline, strict=True))
    figures = [
        Figure("offline.output_rate", statistics.median(offline), "tokens/s"),
        Figure("llm.output_rate", statistics.median(ours), "tokens/s"),
        Figure("llm.ratio", ratio, "ratio"),
        Figure("llm.start", start, "s"),
    ]
    print("\n".join(f"{figure.name:<20} {figure.value:10,.2f} {figure.unit}" for figure in figures))
    if options.output is not None:
        write_rows(options.output, figures, command_line())
    if ratio < options.least:
        sys.exit(f"LLM has {ratio:.2f} of the throughput; at least {options.least} is wanted")


if __name__ == "__main__":
    main()
