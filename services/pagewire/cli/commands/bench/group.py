"""`pagewire bench`: the group of benchmark commands."""

import typer

from pagewire.cli.commands.bench import control, http, kernels, offline, speculative
from pagewire.cli.help.commands import HelpCommand, HelpGroup


def make_app() -> typer.Typer:
    """The commands under `pagewire bench`."""
    app = typer.Typer(
        help="Measure speed: offline, over HTTP, of speculation, of the control plane, or of the "
        "kernels.",
        no_args_is_help=True,
        rich_markup_mode=None,
        cls=HelpGroup,
    )
    app.command("offline", cls=HelpCommand)(offline.offline)
    app.command("http", cls=HelpCommand)(http.http)
    app.command("speculative", cls=HelpCommand)(speculative.speculative)
    app.command("control", cls=HelpCommand)(control.control)
    app.command("kernels", cls=HelpCommand)(kernels.kernels)
    return app
