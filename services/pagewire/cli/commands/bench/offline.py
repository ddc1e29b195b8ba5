"""`pagewire bench offline`: all requests at once, without HTTP."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.bench.offline import (
    OfflineResult,
    OfflineSampling,
    measure_offline,
    read_requests,
    without_wait_limit,
)
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.stack import control_settings
from pagewire.cli.settings.options import configured
from pagewire.models import served_name


@configured(without_wait_limit(control_settings()))
def offline(
    values: dict[str, Any],
    *,
    requests: Annotated[
        Path,
        typer.Option(
            help='File of requests, one a line: {"prompt_token_ids": [1, 2, 3], "max_tokens": 16}.'
        ),
    ],
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Generate max_tokens tokens, even after an end-of-sequence token."
        ),
    ] = False,
    no_detokenize: Annotated[
        bool, typer.Option("--no-detokenize", help="Request token ids only, without text.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Start workers and a scheduler, submit all requests at once over gRPC, and measure them."""
    sampling = OfflineSampling(temperature, ignore_eos, not no_detokenize)
    values = {**values, "skip_tokenizer": values["skip_tokenizer"] or no_detokenize}
    measured = measure_offline(values, read_requests(requests), sampling)
    if measured is None:
        raise typer.Exit(130)
    start_to_ready, result = measured
    model = served_name(values["model"], values["served_model_name"])
    _report(model, start_to_ready, result)
    if output is not None:
        figures = figures_of(_as_result(start_to_ready, result), model)
        write_rows(output, figures, command_line())
    if result.failed:
        raise CommandError(f"{result.failed} requests failed; the first: {result.first_error}")


def _report(model: str, start_to_ready: float, result: OfflineResult) -> None:
    print(
        f"{model}: {result.requests} requests, {result.failed} failed\n"
        f"  start to ready    {start_to_ready:10.2f} s\n"
        f"  wall time         {result.seconds:10.2f} s\n"
        f"  prompt tokens     {result.prompt_tokens:10,} ({result.cached_tokens:,} cached)\n"
        f"  output tokens     {result.output_tokens:10,}\n"
        f"  output throughput {result.output_rate:10,.1f} tokens/s\n"
        f"  total throughput  {result.total_rate:10,.1f} tokens/s"
    )


def _as_result(start_to_ready: float, result: OfflineResult) -> dict[str, Any]:
    return {
        "start_to_ready_seconds": start_to_ready,
        **asdict(result),
        "output_tokens_per_second": result.output_rate,
        "total_tokens_per_second": result.total_rate,
    }
