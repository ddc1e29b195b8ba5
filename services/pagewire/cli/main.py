"""The `pagewire` command."""

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from pagewire.cli.commands import chat as chat_command
from pagewire.cli.commands import demo, generate, keys, models, ps, quantize, run, services
from pagewire.cli.commands import simulate as simulate_command
from pagewire.cli.commands.bench import group as bench
from pagewire.cli.errors import CommandError
from pagewire.cli.help.command import explain
from pagewire.cli.help.commands import HelpCommand, HelpGroup
from pagewire.cli.variables import without_effect
from pagewire.parent_process import PARENT_VARIABLE, end_with_supervisor

# The base class of typer's usage errors (exit status 2), which typer does not export.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# The commands whose flags are settings, and may come from the environment.
_SETTINGS = ("run", "gateway", "scheduler", "worker", "simulated-worker")


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="pagewire",
        help="Pagewire serves large language models: an OpenAI-style API in front of a scheduler "
        "that drives GPU workers over gRPC.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        cls=HelpGroup,
    )
    app.callback()(_root)
    for function in (
        run.run,
        chat_command.chat,
        generate.generate,
        models.models,
        ps.ps,
        demo.demo,
        services.gateway,
        services.scheduler,
        services.worker,
        services.simulated_worker,
        simulate_command.simulate,
        services.health,
        quantize.quantize,
    ):
        app.command(cls=HelpCommand)(function)
    words = {"ignore_unknown_options": True}
    app.command("help", cls=HelpCommand, context_settings=words)(explain)
    app.add_typer(bench.make_app(), name="bench")
    app.add_typer(keys.make_app(), name="keys")
    return app


def main() -> None:
    """Runs the command line. An error is printed as one message and sets the exit status."""
    supervised = PARENT_VARIABLE in os.environ
    if supervised:  # until the service handles it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_supervisor()
    try:
        status = make_app()(standalone_mode=False, prog_name="pagewire", obj=supervised)
    except _UsageError as error:
        _fail(error, 2)
    except CommandError as error:
        _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(error: Exception, status: int) -> NoReturn:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "pagewire"
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    bad_value = type(error) is typer.BadParameter  # its message lists what is valid
    suggests = text.endswith("?") or getattr(error, "possibilities", None)
    if text and status == 2 and context and not bad_value and not suggests:
        text = f"{text.removesuffix('.')}; see `{command} --help`"
    if text:  # empty if the help text has been shown
        print(f"{command}: {text}", file=sys.stderr)
    sys.exit(status)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"pagewire {version('pagewire')}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    command = context.invoked_subcommand
    # A supervisor reports it once for all its services.
    if command in _SETTINGS and not context.obj:
        ignored = without_effect(os.environ, command, context.command)
        if ignored is not None:
            print(f"pagewire {command}: {ignored}", file=sys.stderr)


if __name__ == "__main__":
    main()
