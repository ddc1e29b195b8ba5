"""Decodes one sequence behind a long prompt.

    python -m benchmarks.gpu.behind_long_prompt --model DIR --load-format dummy \
        --max-model-len 131072 [--long 120000] [--tokens 512] [--output FILE.jsonl]

Accepts every flag of `pagewire run`, and starts the same services. The first request computes the
prompt. Each further one, `--rounds` of them, finds the prompt in the prefix cache, and its seconds
are those of decode steps and of one step with the rest of the prompt.
"""

import random
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.serving import TEMPERATURE, settings, vocab_size, with_tokenizer

from pagewire.bench.offline import OfflineSampling, Request, submit_all
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack
from pagewire.cli.settings.options import configured
from pagewire.models import served_name
from pagewire.rpc.credentials import SCHEDULER_TOKEN, read_token


@configured(settings())
def main(
    values: dict[str, Any],
    *,
    long: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 120_000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Outputs behind the cached prompt.")] = 3,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Serve a model, measure it, end."""
    name = served_name(values["model"], values["served_model_name"])
    vocabulary = vocab_size(Path(values["model"]))
    rng = random.Random(0)
    prompt = [rng.randrange(vocabulary // 2, vocabulary) for _ in range(long)]
    sampling = OfflineSampling(TEMPERATURE, ignore_eos=True, detokenize=False)
    token = read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(values["model"], vocabulary, Path(folder))
        values = {**values, "model": model, "served_model_name": name}

        async def measure(stack: Stack) -> dict[str, Any]:
            async def run(count: int) -> tuple[float, int]:
                """Seconds of an output of `count` tokens, and the cached tokens of its prompt."""
                request = [Request(prompt, count)]
                result = await submit_all(stack.grpc_address, request, sampling, token)
                if result.first_error is not None:
                    raise CommandError(result.first_error)
                return result.seconds, result.cached_tokens

            prefill, _ = await run(1)
            runs = [await run(tokens) for _ in range(rounds)]
            rates = [tokens / seconds for seconds, _ in runs]
            cached = min(found for _, found in runs)
            print(
                f"{long} prompt tokens in {prefill:.2f} s; behind them, {cached} cached, "
                f"{max(rates):.1f} tokens/s",
                flush=True,
            )
            return {
                "prefill_s": prefill,
                "cached_tokens": cached,
                "tokens_per_second": max(rates),
                "tokens_per_second_by_round": rates,
            }

        try:
            results = launch(full_stack, values, quiet, measure)
        except CommandError as error:
            raise SystemExit(str(error)) from error
    if output is not None and results is not None:
        figures = {f"behind {long} tokens": results}
        write_rows(output, figures_of(figures, name), command_line())


if __name__ == "__main__":
    typer.run(main)
