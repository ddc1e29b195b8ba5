"""The progress bar of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.llm.batch import Report


@contextmanager
def progress_bar(num_prompts: int, wanted: bool | None) -> Iterator[Report | None]:
    """A bar on the error output, and the function that moves it; None without a bar.

    `wanted` None shows it on a terminal and in a notebook.
    """
    if wanted is False:
        yield None
        return
    # Imported here, so that scripts without a bar start sooner.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if wanted is None and not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("prompts", total=num_prompts, rate="")

        def move(prompts: int, tokens: int) -> None:
            seconds = progress.tasks[bar].elapsed or 0.0
            rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
            progress.update(bar, completed=prompts, rate=rate)

        yield move
