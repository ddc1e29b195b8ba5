"""`pagewire run`: all services on one machine."""

import asyncio
import sys
import time
from typing import Any

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
        print(ready_block(stack, seconds, values, use), flush=True)
        await asyncio.Event().wait()

    report = _json_log if values["log_format"] == "json" else _Log()
    launch(full_stack, values, report, serve)


class _Log:
    """Prints the lines of all services to standard error, with the name of the service."""

    def __init__(self) -> None:
        from rich.console import Console  # here, so that other commands start faster

        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._styles: dict[str, str] = {SUPERVISOR: "bold"}

    def __call__(self, name: str, line: str) -> None:
        style = self._styles.setdefault(name, _COLOURS[len(self._styles) % len(_COLOURS)])
        self._console.print(f"{name:<9} | ", style=style, end="")
        # Services' lines may contain brackets, which rich would read as markup.
        self._console.print(line, markup=False)


def _json_log(name: str, line: str) -> None:
    """Prints the lines of the services unchanged."""
    print(json_line(name, line) if name == SUPERVISOR else line, file=sys.stderr, flush=True)
