"""`pagewire help`: the details of an option, a variable or a command."""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.help.entry import Entry, entries_of
from pagewire.cli.help.page import page, page_width


def explain(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FLAG|VARIABLE|COMMAND",
            help="What to explain, such as --num-slots, num_slots, PAGEWIRE_NUM_SLOTS or run.",
        ),
    ] = None,
) -> None:
    """Explain a flag, an environment variable, a key of a configuration file, or a command."""
    root = context.find_root()
    if not words:
        print(page(root.command, root, full=False, width=page_width()))
        return
    every = list(_walk(root.command, root))
    path = " ".join(["pagewire", *words])
    for command, at in every:
        if at.command_path.partition(" ")[2] == " ".join(words):
            print(page(command, at, full=True, width=page_width()))
            return
    if len(words) > 1:
        raise CommandError(f"{path}: there is no such command; `pagewire help` lists them")
    _explain(words[0], every)


def _explain(word: str, every: list[tuple[Any, Any]]) -> None:
    """Prints the details of an option, once for all commands that share it."""
    commands: dict[Entry, list[str]] = {}
    names: dict[str, None] = {}
    for command, at in every:
        for entry in entries_of(command, at):
            if entry.is_argument:
                continue
            names |= dict.fromkeys((*entry.names, *entry.off))
            if entry.is_named(word):
                commands.setdefault(entry, []).append(at.command_path.partition(" ")[2])
    if not commands:
        flag = "--" + word.removeprefix("PAGEWIRE_").lower().lstrip("-").replace("_", "-")
        near = difflib.get_close_matches(flag, names, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else "; see `pagewire COMMAND --help`"
        raise CommandError(f"{word} is not a flag, variable or command{hint}")
    parts = []
    for entry, having in commands.items():
        listed = ", ".join(dict.fromkeys(having)) or "pagewire"
        parts.append(f"{entry.details(page_width())}\n      Commands: {listed}")
    print("\n\n".join(parts))


def _walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    """Every command with its own context, which has its path."""
    yield command, context
    for name, sub in getattr(command, "commands", {}).items():
        yield from _walk(sub, type(context)(sub, info_name=name, parent=context))
