"""Runs a function beside a stack of services, and always ends the stack."""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.model_files import check_chat_template, check_model, with_model_files
from pagewire.cli.launch.playground import playground
from pagewire.cli.launch.stack import Stack, values_of_models
from pagewire.cli.launch.supervisor import SUPERVISOR, Report, Supervisor, running
from pagewire.lifecycle.terminal import is_at_terminal

Result = TypeVar("Result")
Body = Callable[[Stack], Coroutine[Any, Any, Result]]


def launch(
    make_stack: Callable[[Mapping[str, Any], Path], Stack],
    values: Mapping[str, Any],
    report: Report,
    body: Body[Result],
) -> Result | None:
    """Starts a stack, runs `body(stack)` when it is ready, ends the stack, and returns the result.

    Models of the hub are downloaded first, so that all processes use the same commit. SIGINT or
    SIGTERM cancels the body, ends the stack in order and returns None. A second signal kills the
    stack. SIGHUP makes the services read the API keys again; at a terminal it is like SIGTERM.
    CommandError if the stack does not start.
    """
    values = _with_all_files(values)
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        stack = make_stack(values, Path(folder))
        return asyncio.run(_launch(stack, report, body, values["drain_timeout"]))


def quiet(_name: str, _line: str) -> None:
    """A report that drops all lines. If the stack fails to start, the error has its last lines."""


def _with_all_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings after a download and a check of each model. With several models, an error names
    the model."""
    if "models" not in values:
        found = with_model_files(values)
        check_model(found)
        return found
    models = []
    merged_values = values_of_models(values)
    for merged in merged_values:  # before the first download
        with _naming(merged):
            check_chat_template(merged)
    for own, merged in zip(values["models"], merged_values, strict=True):
        with _naming(merged):
            found = with_model_files(merged)
            check_model(found)
        models.append({**own, "model": found["model"], "tokenizer": found["tokenizer"]})
    return {**values, "models": tuple(models)}


@contextmanager
def _naming(values: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise CommandError(f"{values['served_model_name']}: {error}") from error


async def _launch(
    stack: Stack, report: Report, body: Body[Result], drain_seconds: float
) -> Result | None:
    supervisor = Supervisor(stack.tiers, report, lines_are_shown=report is not quiet)
    task = asyncio.ensure_future(_run(supervisor, stack, body))

    def on_signal() -> None:
        if task.cancelling():
            report(SUPERVISOR, "ending at once: open requests are cut off")
            supervisor.kill()
        else:
            report(
                SUPERVISOR,
                f"draining: open requests have up to {drain_seconds:g} s to finish; Ctrl-C again "
                "ends everything at once",
            )
            task.cancel()

    def on_hangup() -> None:
        if at_terminal:  # which has been closed
            on_signal()
        else:
            supervisor.hang_up()

    at_terminal = is_at_terminal()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _run(supervisor: Supervisor, stack: Stack, body: Body[Result]) -> Result:
    async with playground(stack.playground, supervisor), running(supervisor):
        return await body(stack)
