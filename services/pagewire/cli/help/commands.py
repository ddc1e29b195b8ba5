"""Commands and groups with these help texts, for typer."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagewire.cli.help.page import page, page_width

ALL = "--help-all"


class HelpCommand(TyperCommand):
    """A command whose `--help` has one line for each option, and whose `--help-all` has all."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the short help."""
        formatter.write(page(self, ctx, full=False, width=page_width()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Shows the whole help, or parses the arguments."""
        show_all(self, ctx, args)
        return super().parse_args(ctx, args)


class HelpGroup(TyperGroup):
    """A group of commands, with the same help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the short help."""
        formatter.write(page(self, ctx, full=False, width=page_width()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Shows the whole help, or parses the arguments."""
        if args[:1] == [ALL]:
            show_all(self, ctx, args)
        return super().parse_args(ctx, args)


def show_all(command: Any, ctx: Any, args: list[str]) -> None:
    """Prints the whole help of a command and ends, if the arguments ask for it."""
    if ALL in args[: args.index("--") if "--" in args else None]:
        print(page(command, ctx, full=True, width=page_width()))
        raise typer.Exit
