"""Run vLLM on files of requests, all requests of a file at once: the offline baseline.

    PYTHONPATH=services:shared python benchmarks/peers/vllm/offline.py --model DIR FILE... \
        [--output OUT.jsonl]

Runs in an environment that has vLLM. `benchmarks/write_requests.py` writes the files. Weights are
random, so DIR needs only a config.json. The best of `--rounds` counts; the prefix cache is on, and
emptied between rounds.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams

from pagewire.bench.results import Figure, command_line, write_rows

TEMPERATURE = 0.6


def read(path: Path) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """The prompts of a file, and how each is sampled."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sampling = [
        SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=line["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        for line in lines
    ]
    return [{"prompt_token_ids": line["prompt_token_ids"]} for line in lines], sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model, began = options.model.name, time.perf_counter()
    engine = LLM(
        model=str(options.model),
        load_format="dummy",
        dtype="bfloat16",
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    figures = [Figure(f"{model}/seconds_to_ready", time.perf_counter() - began, "s")]
    for path in options.files:
        prompts, sampling = read(path)
        tokens = sum(each.max_tokens or 0 for each in sampling)
        if path.stem == "prefill_heavy":  # its rate counts prompts too
            tokens += sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        seconds = []
        for _ in range(options.rounds):
            engine.reset_prefix_cache()
            began = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        name = f"{model}/{path.stem}"
        figures.append(Figure(f"{name}/tokens_per_second", tokens / min(seconds), "tokens/s"))
        figures += [
            Figure(f"{name}/tokens_per_second_by_round/{number}", tokens / each, "tokens/s")
            for number, each in enumerate(seconds, start=1)
        ]
        print(f"{path.stem:<14} {tokens / min(seconds):12,.1f} tokens/s", flush=True)
    if options.output is not None:
        write_rows(options.output, figures, command_line(), release=f"vLLM {vllm.__version__}")


if __name__ == "__main__":
    main()
