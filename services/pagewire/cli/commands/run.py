"""`pagewire run`: all services on one machine."""

import asyncio
import contextlib
import os
import sys
import time
from typing import Any, TextIO

import typer

from pagewire.cli.launch.launch import launch
from pagewire.cli.launch.stack import Stack, full_stack, model_settings, stack_settings
from pagewire.cli.launch.supervisor import SUPERVISOR
from pagewire.cli.ready import ready_block, use_of_model
from pagewire.cli.settings.options import configured
from pagewire.lifecycle.logs import json_line

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")


@configured(stack_settings(), model_settings())
def run(values: dict[str, Any]) -> None:
    """Run workers, a scheduler and the HTTP gateway on this machine.

    Several models have workers and a scheduler each, and share the gateway.

    A process that ends unexpectedly is restarted. Ctrl-C ends all of them.
    """
    started = time.monotonic()

    async def serve(stack: Stack) -> None:
        use = await use_of_model(stack.models[0])
        seconds = time.monotonic() - started
        _write(ready_block(stack, seconds, values, use), sys.stdout)
        await asyncio.Event().wait()

    report = _json_log if values["log_format"] == "json" else _Log()
    launch(full_stack, values, report, serve)


class _Log:
    """Prints the lines of all services to standard error, with the name of the service."""

    def __init__(self) -> None:
        self._coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, str | None] = {SUPERVISOR: None}

    def __call__(self, name: str, line: str) -> None:
        start = f"{name:<9} | "
        if self._coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            start = typer.style(start, fg=colour, bold=colour is None)
        _write(start + line, sys.stderr)


def _json_log(name: str, line: str) -> None:
    """Prints the lines of the services unchanged."""
    _write(json_line(name, line) if name == SUPERVISOR else line, sys.stderr)


def _write(text: str, file: TextIO) -> None:
    """Writes a line. A full disk or a reader that has ended loses lines, but must not disturb the
    services, which would wait for their output to be read."""
    with contextlib.suppress(OSError):
        print(text, file=file, flush=True)
