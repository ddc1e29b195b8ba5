"""The loss of quality by quantization: the embedded model in each format beside the plain one.

Each format is served as by users. Perplexity is computed on held-out answers and stories, from log
probabilities of prompts. Sums are those of the model's card, or every nth of them. The figure of
the ten questions is the number of answers that equal those of the plain model.

    python -m benchmarks.quantization --output benchmarks/results/quantization-cpu.jsonl
"""

import argparse
import math
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer
from tools.embedded_model.evaluate import PROBES, small_sums
from tools.embedded_model.packing import Rows, pack

from pagewire.bench.results import Figure, write_rows
from pagewire.llm import LLM, SamplingParams
from pagewire.models import resolve_model
from pagewire.worker.quantizing.folder import quantize_folder

QUESTIONS = [PROBES[i][0] for i in (0, 1, 4, 5, 7, 8, 9, 10, 18, 25)]
LENGTH = 1024
# Relative to the perplexity of the plain model.
LIMITS = {"fp8": 1.005, "int8": 1.005, "int4": 1.03, "fp8 KV": 1.003}

Target = Literal["fp8", "int8", "int4"]


def perplexity(llm: LLM, rows: Rows) -> float:
    """The perplexity of the learned tokens of the rows."""
    prompts = [{"prompt_token_ids": row.tolist()} for row in rows.ids]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    losses: list[float] = []
    outputs = llm.generate(prompts, params, progress=False)
    for output, ids, learned in zip(outputs, rows.ids, rows.learned, strict=True):
        assert output.prompt_logprobs is not None
        for at in np.flatnonzero(learned[1:]) + 1:
            scored = output.prompt_logprobs[at]
            assert scored is not None
            losses.append(-scored[int(ids[at])].logprob)
    return math.exp(sum(losses) / len(losses))


def answers(llm: LLM, questions: list[str], max_tokens: int) -> list[str]:
    """Greedy answers, each in its own conversation."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [output.outputs[0].text for output in llm.chat(chats, params, progress=False)]


def calibration_texts(tokenizer: Tokenizer, path: Path) -> Path:
    """Writes texts to `path` that the evaluation does not use."""
    rows = pack(tokenizer, 3, 60, 512)
    texts = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows.ids]
    path.write_text("".join(texts), encoding="utf-8")
    return path


def formats(folder: Path, work: Path, texts: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """The name of each format, the folder to serve and the settings to serve it with."""
    yield "plain", folder, {}
    yield "fp8 KV", folder, {"kv_cache_dtype": "fp8"}
    yield "fp8 online, fp8 KV", folder, {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    for kind in ("fp8", "int8"):
        yield f"{kind} online", folder, {"quantization": kind}
    written: list[tuple[str, Target, int]] = [
        ("fp8", "fp8", 128),
        ("int8", "int8", 128),
        ("int4, groups of 128", "int4", 128),
        ("int4, groups of 32", "int4", 32),
    ]
    for name, target, group in written:
        quantize_folder(folder, work / name, target, group)
        yield name, work / name, {}
        name = f"{name}, calibrated"
        quantize_folder(folder, work / name, target, group, texts)
        yield name, work / name, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--heldout", type=int, default=500, help="documents")
    parser.add_argument("--every", type=int, default=1, help="ask every nth sum")
    parser.add_argument("--only", nargs="*", help="names of formats beside the plain one; all")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = pack(tokenizer, 2, options.heldout, LENGTH)  # the seed of the card
    sums = small_sums()[:: options.every]
    figures: list[Figure] = []
    plain: tuple[float, list[str]] | None = None
    with tempfile.TemporaryDirectory() as work:
        texts = calibration_texts(tokenizer, Path(work) / "texts.txt")
        for name, served, settings in formats(folder, Path(work), texts):
            if options.only is not None and name not in ("plain", *options.only):
                continue
            with LLM(served, **settings) as llm:
                found = perplexity(llm, rows)
                told = answers(llm, QUESTIONS, 96)
                right = sum(
                    answer == given
                    for answer, (_, given) in zip(
                        answers(llm, [question for question, _ in sums], 32), sums, strict=True
                    )
                )
            plain = plain or (found, told)
            ratio = found / plain[0]
            same = sum(one == other for one, other in zip(told, plain[1], strict=True))
            figures += [
                Figure(f"{name}/perplexity", found, "ratio"),
                Figure(f"{name}/perplexity over plain", ratio, "ratio"),
                Figure(f"{name}/sums right", right / len(sums), "ratio"),
                Figure(f"{name}/questions answered alike", same / len(QUESTIONS), "ratio"),
            ]
            print(
                f"{name:22} perplexity {found:.5f} ({ratio - 1:+.3%}), sums {right}/{len(sums)}, "
                f"questions {same}/{len(QUESTIONS)}",
                flush=True,
            )
            limit = LIMITS.get(name) or LIMITS.get(name.split()[0].rstrip(","))
            if limit is not None and ratio > limit:
                print(f"{'':22} above its limit of {limit - 1:.1%}")
    if options.output is not None:
        command = shlex.join(["python", "-m", "benchmarks.quantization", *sys.argv[1:]])
        write_rows(options.output, figures, command)


if __name__ == "__main__":
    main()
