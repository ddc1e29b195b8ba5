"""`pagewire keys`: the API keys of gateways and schedulers."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pagewire.cli.errors import CommandError

_Limit = Annotated[int | None, typer.Option(min=1, help="Most of these for the key.")]


def make_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(help="API keys of gateways and schedulers.", no_args_is_help=True)
    app.callback()(_group)
    app.command()(new)
    return app


def _group() -> None:
    pass


def new(
    name: Annotated[str, typer.Argument(help="Whose key it is; unique in its file.")],
    file: Annotated[
        Path | None, typer.Option(help="Key file that the line is added to, made if needed.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whom the key's requests count for; by default its name.")
    ] = None,
    requests_per_minute: _Limit = None,
    tokens_per_minute: _Limit = None,
    max_concurrent: _Limit = None,
) -> None:
    """Make an API key: print it, and the line of the key file that stands for it.

    The key is shown this once; the file holds its SHA-256. A running gateway or scheduler reads its
    file again on SIGHUP.
    """
    from pagewire.auth.keys import KeyRing, entry_of, keys_in, new_key
    from pagewire.auth.rate_limits import RateLimits

    key = new_key()
    limits = RateLimits(requests_per_minute, tokens_per_minute, max_concurrent)
    line = entry_of(name, key, tenant, limits)
    try:
        keys_in(line, "this key")
        if file is None:
            print(f"key:  {key}\nline: {line}")
            return
        before = file.read_text() if file.exists() else ""
        if before.strip() and name in KeyRing(keys_in(before, str(file))).names:
            raise CommandError(f"{file} has a key {name!r} already; choose another name")
        added = f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n"
        # A list in brackets, as in JSON, takes no line behind it.
        keys_in(before + added, f"{file} with this line behind it")
        _append(file, added)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    print(key)


def _append(file: Path, text: str) -> None:
    """Adds to a file that its owner alone may read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as stream:
        stream.write(text)
