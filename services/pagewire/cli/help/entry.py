"""The help text of one option or argument of a command."""

import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
_INDENT = " " * 6


@dataclass(frozen=True, slots=True)
class Entry:
    """One option or argument.

    `names` are its flags, or the argument's name; `off` are the flags that turn a switch off.
    `value` is the placeholder of its value, empty for a switch.
    """

    names: tuple[str, ...]
    off: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    text: str
    default: str
    environment: str
    required: bool
    is_argument: bool

    @property
    def label(self) -> str:
        """Its name in the list of a command's options."""
        return self.names[0].upper() if self.is_argument else ", ".join(self.names)

    def is_named(self, word: str) -> bool:
        """Whether a word names this option: a flag, a key of a file, or a variable."""
        name = "--" + word.strip().lstrip("-").replace("_", "-")
        return word == self.environment or word in self.names or name in self.names + self.off

    def line(self, column: int, width: int) -> str:
        """One line of at most `width` characters, with the text from `column` on."""
        end = " (required)" if self.required else ""
        room = width - column - len(end)
        return f"  {self.label:<{column - 4}}  {_shortened(self.text, room)}{end}".rstrip()

    def details(self, width: int) -> str:
        """All its details, in lines of at most `width` characters."""
        names = self.label if not self.off else f"{self.label} / {', '.join(self.off)}"
        head = f"  {names} {self.value}".rstrip()
        parts = [self.text]
        if self.choices:
            parts.append(f"One of: {', '.join(self.choices)}.")
        if self.required:
            parts.append("Required.")
        if self.default:
            parts.append(f"Default: {self.default}.")
        if self.environment:
            parts.append(f"Environment: {self.environment}")
        lines = [head]
        for part in parts:
            lines += textwrap.wrap(
                part,
                width,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)


def entries_of(command: Any, context: Any) -> list[Entry]:
    """The options and arguments of a command in their order; `--help` comes last."""
    kinds = _kinds(command.callback)
    return [
        _entry(parameter, kinds.get(parameter.name))
        for parameter in command.get_params(context)
        if not getattr(parameter, "hidden", False)
    ]


def _entry(parameter: Any, kind: Any) -> Entry:
    is_argument = parameter.param_type_name == "argument"
    metavar = parameter.metavar or ""
    choices: tuple[str, ...] = ()
    if metavar.startswith("["):
        metavar, choices = "CHOICE", tuple(metavar.strip("[]").split("|"))
    if not metavar and not is_argument and not getattr(parameter, "is_flag", False):
        metavar = _METAVARS.get(kind, "VALUE")
    text = getattr(parameter, "help", None) or ""
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else ""
    if not default and shown and parameter.default not in (None, False):
        default = str(parameter.default)
    if parameter.name == "help":
        default = ""
    return Entry(
        names=(parameter.name,) if is_argument else _long_first(parameter.opts),
        off=tuple(parameter.secondary_opts),
        value=metavar,
        choices=choices,
        text=" ".join(text.split()),
        default=default,
        environment=parameter.envvar if isinstance(parameter.envvar, str) else "",
        required=parameter.required,
        is_argument=is_argument,
    )


def _long_first(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: not name.startswith("--")))


def _kinds(callback: Callable[..., Any] | None) -> dict[str, Any]:
    """The types of a command's own parameters; `X | None` counts as X."""
    if callback is None:
        return {}
    found = {}
    for name, annotation in get_type_hints(inspect.unwrap(callback)).items():
        kind = annotation
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        found[name] = kind
    return found


def _shortened(text: str, room: int) -> str:
    """The first sentence if it fits, otherwise as many of its words as fit."""
    first = text.partition(". ")[0].removesuffix(".")
    if len(first) <= room:
        return first
    return textwrap.shorten(first, room, placeholder=" ...", break_on_hyphens=False)
