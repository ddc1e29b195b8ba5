"""`pagewire bench`: the group of benchmark commands."""

import typer

from pagewire.cli.commands import bench_control, bench_http, bench_kernels, bench_offline


def make_app() -> typer.Typer:
    """The commands under `pagewire bench`."""
    app = typer.Typer(
        help="Measure speed: offline, over HTTP, of the control plane, or of the kernels.",
        no_args_is_help=True,
    )
    app.command("offline")(bench_offline.offline)
    app.command("http")(bench_http.http)
    app.command("control")(bench_control.control)
    app.command("kernels")(bench_kernels.kernels)
    return app
