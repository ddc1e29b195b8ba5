"""Settings of the command line, derived from the fields of configuration dataclasses.

Flags, environment variables, configuration files and the arguments of child processes use them.
"""

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration dataclass.

    The field's metadata may hold `help`, `minimum`, `maximum` and `env`, the environment variable
    if it is not PAGEWIRE_ and the name. Only a maximum of infinity allows infinity.
    """

    name: str
    kind: type  # bool, int, float or str
    choices: tuple[str, ...]
    default: Any
    help: str
    env: str
    minimum: float | None
    maximum: float | None

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """The placeholder of the value in help texts."""
        if self.choices:
            return "[" + "|".join(self.choices) + "]"
        return {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "BOOLEAN"}[self.kind]

    def parse(self, text: str) -> Any:
        """The value of a text; ValueError states the problem and the valid values."""
        if self.kind is bool:
            return _parse_bool(text)
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is not a choice; give one of {', '.join(self.choices)}")
        if self.kind is str:
            return text
        value = _parse_number(self.kind, text)
        if not _within(value, self.minimum, self.maximum):
            raise ValueError(f"{text} is out of range; give {self._range()}")
        return value

    def _range(self) -> str:
        if self.minimum is None and self.maximum is None:
            return "a number"
        if self.maximum is None:
            return f"at least {self._written(self.minimum)}"
        if self.minimum is None:
            return f"at most {self._written(self.maximum)}"
        return f"{self._written(self.minimum)} to {self._written(self.maximum)}"

    def _written(self, bound: float | None) -> str:
        return f"{bound:.0f}" if self.kind is int else f"{bound:g}"


def settings_of(config_type: type) -> dict[str, Setting]:
    """The settings of a configuration dataclass by name, in the order of its fields."""
    hints = get_type_hints(config_type)
    found = {}
    for field in fields(config_type):
        kind, choices = _kind(hints[field.name])
        found[field.name] = Setting(
            name=field.name,
            kind=kind,
            choices=choices,
            default=field.default,
            help=str(field.metadata["help"]),
            env=field.metadata.get("env", f"PAGEWIRE_{field.name.upper()}"),
            minimum=field.metadata.get("minimum"),
            maximum=field.metadata.get("maximum"),
        )
    return found


def union_of(config_types: Iterable[type], without: Iterable[str] = ()) -> dict[str, Setting]:
    """The settings of several dataclasses. The first one with a name wins."""
    left_out = set(without)
    union: dict[str, Setting] = {}
    for config_type in config_types:
        for name, setting in settings_of(config_type).items():
            if name not in left_out:
                union.setdefault(name, setting)
    return union


def nearest_setting(name: str, settings: Mapping[str, Setting]) -> str:
    """A hint for an unknown name: the setting with the nearest name, or all settings."""
    near = difflib.get_close_matches(name.replace("-", "_"), settings, n=1, cutoff=0.5)
    if near:
        return f"the nearest valid one is {near[0]!r}"
    return f"valid ones are {', '.join(sorted(settings))}"


def build(config_type: type[Config], values: Mapping[str, Any], **given: Any) -> Config:
    """A configuration from its own settings in `values`, and from `given`, which must all be its
    settings."""
    names = {field.name for field in fields(config_type)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in values.items() if name in names}
    return config_type(**{**chosen, **given})


def arguments(config: Any) -> list[str]:
    """The flags that pass the same configuration to another process."""
    flags = []
    for setting in settings_of(type(config)).values():
        value = getattr(config, setting.name)
        if value is None:
            continue
        if setting.kind is bool:
            flags.append(setting.flag if value else "--no-" + setting.flag[2:])
        else:
            flags.append(f"{setting.flag}={value}")
    return flags


def _kind(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """The type of an annotation and the choices of a Literal. `X | None` counts as X."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    return annotation, ()


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{text!r} is not {wanted}") from None


def _within(value: float, minimum: float | None, maximum: float | None) -> bool:
    # NaN is outside every range.
    above = minimum is None or value >= minimum
    below = value < math.inf if maximum is None else value <= maximum
    return above and below and value == value
