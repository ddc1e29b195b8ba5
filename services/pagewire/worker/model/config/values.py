"""Checked values of config.json."""

from collections.abc import Mapping
from typing import Any

from pagewire.worker.errors import SetupError


def positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The integer `name`; SetupError if it is not an integer above 0."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SetupError(f"config.json: {name} is {value!r}; it must be a positive integer")
    return value


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The number `name`; SetupError if it is not a number above 0."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise SetupError(f"config.json: {name} is {value!r}; it must be a number above 0")
    return float(value)


def flag(raw: Mapping[str, Any], declared: bool | str) -> bool:
    """The value that a family declares, or the value of the key that the family names."""
    return bool(raw.get(declared)) if isinstance(declared, str) else declared
