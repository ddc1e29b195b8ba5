"""Structured output: its cost, and whether every output is valid.

`cost` compares constrained requests with free ones in alternating rounds, by wall time and, for a
busy machine, by the CPU time of all processes. In a round each client sends some requests one after
another. Lengths differ between clients, so that requests do not end in the same step. Both kinds
have the same lengths. A constrained output is a list of objects of ten fields.

`validity` draws outputs for random schemas and checks the complete ones with `jsonschema`. Ends
with status 1 if one is not valid.

    python benchmarks/structured_output.py cost --output benchmarks/results/structured-cpu.jsonl
    python benchmarks/structured_output.py validity --requests 10000 --schemas 250
    python benchmarks/structured_output.py cost --model DIR --load-format dummy --num-slots 512 \
        --concurrency 64 256

The model is the embedded one, or a DIR with a config.json and a tokenizer.json, which
`train_tokenizer.py` can make. The tokenizer must have the `eos_token_id` of config.json as a
special token: an ordinary one may be drawn within a string, and ends the output.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

from pagewire.bench.http_load import words
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.bench.schemas import LISTS, Schema, random_schema
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, temporary_stack
from pagewire.models import served_name


class Client:
    """Sends requests to the gateway of a stack."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/completions"
        self._session = session

    async def ask(self, prompt: str, schema: Schema | None, **fields: Any) -> dict[str, Any]:
        """The body of an answer; exits if the request is refused."""
        body = {"prompt": prompt, **fields}
        if schema is not None:
            kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body["response_format"] = kind
        async with self._session.post(self._url, json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                sys.exit(f"a request failed: {answer['error']['message']}")
            return answer


async def cost(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The cost by the number of requests at once."""
    return {f"{n} at once": await cost_of(client, n, args) for n in args.concurrency}


async def cost_of(client: Client, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of free and of constrained requests, and their ratio."""
    draw = random.Random(0)
    shortest = args.max_tokens // 4
    lengths = [
        [draw.randint(shortest, args.max_tokens) for _ in range(args.turns)]
        for _ in range(concurrency)
    ]

    async def seconds(schema: Schema | None) -> tuple[float, float]:
        """Wall time of a round, and CPU time of the processes of the stack, in seconds."""
        # A list of 50 objects is longer than the longest output.
        fields = {"ignore_eos": schema is None, "temperature": 1}

        async def requests(lengths: list[int]) -> None:
            for length in lengths:
                answer = await client.ask(words(draw, 32), schema, max_tokens=length, **fields)
                counted = answer["usage"]["completion_tokens"]
                assert counted == length, f"{counted} tokens of {length}: {answer}"

        began, computed = time.perf_counter(), cpu_seconds()
        await asyncio.gather(*map(requests, lengths))
        return time.perf_counter() - began, cpu_seconds() - computed

    await seconds(None)
    await seconds(LISTS)
    free, constrained = [], []
    for _ in range(args.rounds):
        free.append(await seconds(None))
        constrained.append(await seconds(LISTS))
    tokens = sum(map(sum, lengths))

    def over(which: int) -> float:
        """The median over the rounds of constrained over free."""
        pairs = zip(constrained, free, strict=True)
        return statistics.median(a[which] / b[which] for a, b in pairs)

    return {
        "free": {"tokens/s": tokens / statistics.median(taken for taken, _ in free)},
        "constrained": {"tokens/s": tokens / statistics.median(taken for taken, _ in constrained)},
        "constrained_time_over_free": over(0),
        "constrained_cpu_time_over_free": over(1),
    }


def cpu_seconds() -> float:
    """CPU seconds of the descendants of this process so far."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_ours(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return sum(each for pid, each in ticks.items() if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


async def validity(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of complete outputs, of invalid ones, and of cut ones."""
    places = asyncio.Semaphore(args.concurrency[0])
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    found = {"complete": 0, "invalid": 0, "cut": 0}

    async def one(number: int) -> None:
        schema = random_schema(number % args.schemas)
        fields = {"max_tokens": args.max_tokens, "seed": number, "temperature": 1}
        async with places:
            answer = await client.ask("An example of JSON:", schema, **fields)
        (choice,) = answer["choices"]
        if choice["finish_reason"] != "stop":
            assert answer["usage"]["completion_tokens"] == args.max_tokens
            found["cut"] += 1
            return
        found["complete"] += 1
        try:
            validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
            validator.validate(json.loads(choice["text"]))
        except (ValueError, jsonschema.ValidationError) as error:
            found["invalid"] += 1
            print(f"not valid: {choice['text']!r} for {json.dumps(schema)}: {error}")

    await asyncio.gather(*map(one, range(args.requests)))
    return {"schemas": args.schemas, "outputs": args.requests, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", choices=["cost", "validity"])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--num-slots", type=int, default=128)
    parser.add_argument("--mask-processes", type=int, help="processes that compute masks")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16], help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=250)
    parser.add_argument("--output", type=Path, help="write the figures as rows")
    args = parser.parse_args()

    async def measure(stack: Stack) -> dict[str, Any]:
        assert stack.url is not None
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            task = cost if args.figures == "cost" else validity
            return await task(Client(stack.url, session), args)

    settings = {"model": args.model, "load_format": args.load_format, "num_slots": args.num_slots}
    if args.mask_processes is not None:
        settings["mask_processes"] = args.mask_processes
    stack = temporary_stack(**settings, max_waiting_seconds=math.inf)
    figures = launch(full_stack, stack, quiet, measure)
    if figures is None:
        sys.exit(130)
    print(json.dumps(figures, indent=2))
    if args.output:
        name = served_name(args.model, None)
        write_rows(args.output, figures_of({args.figures: figures}, name), command_line())
    if figures.get("invalid"):
        sys.exit(1)


if __name__ == "__main__":
    main()
