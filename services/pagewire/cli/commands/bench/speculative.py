"""`pagewire bench speculative`: speculation on recorded texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.bench.speculative import (
    SpeculativeLoad,
    SpeculativeResult,
    measure_speculative,
    read_texts,
    speculative_settings,
)
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.model_files import with_model_files
from pagewire.cli.settings.options import configured
from pagewire.cli.table import table
from pagewire.models import served_name


@configured(speculative_settings())
def speculative(
    values: dict[str, Any],
    *,
    replay: Annotated[
        Path,
        typer.Option(
            help='File of texts, one a line: {"kind": "chat", "prompt": "...", "continuation": '
            '"...", "prediction": "..."}; kind and prediction may be left out.'
        ),
    ],
    clients: Annotated[
        str, typer.Option(help="Numbers of clients that send requests at the same time.")
    ] = "1,8",
    kinds: Annotated[
        str | None, typer.Option(help="Kinds of texts to run, such as edit,chat; all by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are their medians.")] = 3,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each client in a round, at least.")
    ] = 2,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Leave out the run without speculation.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Replay recorded texts with and without speculation, and measure speed and acceptance.

    The worker does all work of serving with random weights, and then takes the recorded token for
    the one drawn. So drafts are right as often as with a model that writes these texts.
    """
    numbers = _numbers(clients)
    values = with_model_files(values)
    texts = read_texts(replay, values["model"], values["tokenizer"])
    if kinds is not None:
        wanted = kinds.split(",")
        texts = [text for text in texts if text.kind in wanted]
        if missing := set(wanted) - {text.kind for text in texts}:
            raise CommandError(f"--kinds: {replay} has no texts of kind {min(missing)}")
    load = SpeculativeLoad(numbers, rounds, requests)
    baseline = not no_baseline and values["speculate"] != "none"
    results = measure_speculative(values, texts, load, baseline)
    if results is None:
        raise typer.Exit(130)
    print(_table(results))
    if output is not None:
        model = served_name(values["model"], values["served_model_name"])
        write_rows(output, _figures(model, results), command_line())


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise CommandError(f"--clients {text}: give numbers of at least 1, such as 1,8,64")
    return numbers


def _ratio(result: SpeculativeResult, results: Sequence[SpeculativeResult]) -> float | None:
    """The rate relative to the run without speculation; None without that run."""
    for plain in results:
        if (plain.kind, plain.clients, plain.mode) == (result.kind, result.clients, "none"):
            return result.tokens_per_second / plain.tokens_per_second
    return None


def _table(results: Sequence[SpeculativeResult]) -> str:
    titles = ("texts", "clients", "drafts", "tokens/s", "ratio", "tokens/s of one", "tokens/step")
    rows = []
    for result in sorted(results, key=lambda each: (each.kind, each.clients)):
        ratio = _ratio(result, results)
        by_drafter = ", ".join(
            f"{name} {result.accepted.get(name, 0)}/{count}"
            for name, count in sorted(result.drafted.items())
        )
        rows.append(
            (
                result.kind,
                str(result.clients),
                result.mode,
                f"{result.tokens_per_second:,.1f}",
                "" if ratio is None else f"{ratio:.2f}x",
                f"{result.stream_tokens_per_second:,.1f}",
                f"{result.tokens_per_step:.2f}",
                f"{result.acceptance:.0%}" if result.drafted else "",
                by_drafter,
            )
        )
    return table((*titles, "right", "by drafter"), rows)


def _figures(model: str, results: Sequence[SpeculativeResult]) -> Iterator[Figure]:
    for result in results:
        name = f"{model}/{result.kind}/{result.clients}/{result.mode}"
        yield Figure(f"{name}/tokens_per_second", result.tokens_per_second, "tokens/s")
        one = result.stream_tokens_per_second
        yield Figure(f"{name}/stream_tokens_per_second", one, "tokens/s")
        yield Figure(f"{name}/tokens_per_step", result.tokens_per_step, "ratio")
        if (ratio := _ratio(result, results)) is not None:
            yield Figure(f"{name}/ratio", ratio, "ratio")
        for drafter, count in sorted(result.drafted.items()):
            right = result.accepted.get(drafter, 0)
            yield Figure(f"{name}/drafts/{drafter}", count, "count")
            yield Figure(f"{name}/accepted/{drafter}", right, "count")
