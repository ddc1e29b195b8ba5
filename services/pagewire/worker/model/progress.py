"""The progress of reading or writing weights, on a terminal or in the log."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

log = logging.getLogger(__name__)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error if that is a terminal, else one log line.

    Yields a function; pass it the number of bytes done since its last call.
    """
    if not sys.stderr.isatty():
        log.info("%s, %.2f GB", what, total / 1e9)
        yield lambda done: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
