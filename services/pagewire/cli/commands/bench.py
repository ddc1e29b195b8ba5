"""`pagewire bench`: the group of benchmark commands."""

import typer

from pagewire.cli.commands import bench_control, bench_http, bench_kernels, bench_offline
from pagewire.cli.help.commands import HelpCommand, HelpGroup


def make_app() -> typer.Typer:
    """The commands under `pagewire bench`."""
    app = typer.Typer(
        help="Measure speed: offline, over HTTP, of the control plane, or of the kernels.",
        no_args_is_help=True,
        rich_markup_mode=None,
        cls=HelpGroup,
    )
    app.command("offline", cls=HelpCommand)(bench_offline.offline)
    app.command("http", cls=HelpCommand)(bench_http.http)
    app.command("control", cls=HelpCommand)(bench_control.control)
    app.command("kernels", cls=HelpCommand)(bench_kernels.kernels)
    return app
