"""`pagewire keys`: the API keys of gateways and schedulers."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.help.commands import HelpCommand, HelpGroup


def _limit(what: str) -> Any:
    return typer.Option(min=1, help=f"Maximum number of {what}; by default there is no limit.")


def make_app() -> typer.Typer:
    """The commands under `pagewire keys`."""
    app = typer.Typer(
        help="API keys of gateways and schedulers.",
        no_args_is_help=True,
        rich_markup_mode=None,
        cls=HelpGroup,
    )
    app.callback()(_group)
    app.command(cls=HelpCommand)(new)
    return app


def _group() -> None:
    pass


def new(
    name: Annotated[str, typer.Argument(help="Name of the key, unique in its file.")],
    file: Annotated[
        Path | None, typer.Option(help="Key file to add the key to; made if it does not exist.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Tenant of the key's requests, for fair scheduling; by default the key's name."
        ),
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("requests a minute")] = None,
    tokens_per_minute: Annotated[
        int | None, _limit("tokens a minute, of prompts and outputs together")
    ] = None,
    max_concurrent: Annotated[int | None, _limit("prompts that run at once")] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="The key may see the engine on the page.")
    ] = False,
) -> None:
    """Make an API key. Print it, and without --file also its line for the key file.

    The key cannot be shown again: the file holds its SHA-256 only. A running gateway or scheduler
    reads its file again on SIGHUP.
    """
    from pagewire.auth.keys import KeyRing, entry_of, keys_in, new_key
    from pagewire.auth.rate_limits import RateLimits

    key = new_key()
    limits = RateLimits(requests_per_minute, tokens_per_minute, max_concurrent)
    line = entry_of(name, key, tenant, limits, operator)
    try:
        keys_in(line, "this key")
        if file is None:
            print(f"key:  {key}\nline: {line}")
            return
        before = file.read_text() if file.exists() else ""
        if before.strip() and name in KeyRing(keys_in(before, str(file))).names:
            raise CommandError(f"{file} has a key {name!r} already; choose another name")
        added = f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n"
        # A line cannot be added to a list in brackets, as in JSON.
        keys_in(before + added, f"{file} with this line added")
        _append(file, added)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    print(key)


def _append(file: Path, text: str) -> None:
    """Appends to a file; only its owner can read a new file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as stream:
        stream.write(text)
