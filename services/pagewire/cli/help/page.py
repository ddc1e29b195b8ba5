"""The help page of a command."""

import shutil
import textwrap
from typing import Any

from pagewire.cli.help.entry import Entry, entries_of

MAX_WIDTH = 100
MIN_WIDTH = 60
# Longer names have no text beside them.
MAX_COLUMN = 38


def page_width() -> int:
    """The terminal's width; 80 in a pipe."""
    return min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns))


def page(command: Any, context: Any, *, full: bool, width: int) -> str:
    """A command's help: one line for each option, or with `full` the details of each."""
    entries = entries_of(command, context)
    arguments = [entry for entry in entries if entry.is_argument]
    options = [entry for entry in entries if not entry.is_argument]
    parts = [
        _wrapped(f"Usage: {context.command_path} {_usage(command, context)}", width),
        _description(command, width),
        _list("Arguments", arguments, full, width),
        _list("Options", options, full, width),
        _commands(command, width),
        _wrapped(_hint(command, context, options, full), width),
    ]
    return "\n\n".join(part for part in parts if part)


def _usage(command: Any, context: Any) -> str:
    return " ".join(command.collect_usage_pieces(context))


def _description(command: Any, width: int) -> str:
    paragraphs = (command.help or "").strip().split("\n\n")
    return "\n\n".join(_wrapped(" ".join(p.split()), width) for p in paragraphs)


def _list(title: str, entries: list[Entry], full: bool, width: int) -> str:
    if not entries:
        return ""
    if full:
        return "\n\n".join([f"{title}:", *(entry.details(width) for entry in entries)])
    column = _column([entry.label for entry in entries])
    return "\n".join([f"{title}:", *(entry.line(column, width) for entry in entries)])


def _commands(command: Any, width: int) -> str:
    commands = getattr(command, "commands", {})
    if not commands:
        return ""
    column = _column(list(commands))
    lines = ["Commands:"]
    for name, sub in commands.items():
        text = " ".join((sub.help or "").split())
        lines.append(Entry((name,), (), "", (), text, "", "", False, False).line(column, width))
    return "\n".join(lines)


def _column(labels: list[str]) -> int:
    return min(MAX_COLUMN, max(map(len, labels)) + 4)


def _hint(command: Any, context: Any, options: list[Entry], full: bool) -> str:
    if getattr(command, "commands", None):
        return f"More of each: {context.command_path} COMMAND --help"
    if full or len(options) < 2:
        return ""
    switches = any(option.off for option in options)
    no = " A switch --NAME is turned off by --no-NAME." if switches else ""
    example = max(options, key=lambda option: len(option.text)).names[0]
    path = context.command_path
    return f"All about each: {path} --help-all. About one: pagewire help {example}.{no}"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
