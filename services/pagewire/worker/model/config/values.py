"""Checked values of config.json."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from pagewire.worker.errors import SetupError

LARGEST = 2**31 - 1
MOST_PARTS = 10_000  # of layers, or of experts: each needs objects here


def positive(
    raw: Mapping[str, Any], name: str, default: int | None = None, most: int = LARGEST
) -> int:
    """The integer `name`; SetupError if it is not an integer above 0, or is above `most`."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SetupError(f"config.json: {name} is {value!r}; it must be a positive integer")
    if value > most:
        raise SetupError(f"config.json: {name} is {value!r}; it must be {most} at most")
    return value


def above_zero(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The number `name`; SetupError if it is not a finite number above 0."""
    value = raw.get(name)
    value = default if value is None else value
    if not above_zero(value):
        raise SetupError(f"config.json: {name} is {value!r}; it must be a number above 0")
    return float(value)


def flag(raw: Mapping[str, Any], declared: bool | str) -> bool:
    """The value that a family declares, or the value of the key that the family names.

    SetupError if that is not true or false. Without a value it is false.
    """
    if isinstance(declared, bool):
        return declared
    value = raw.get(declared)
    if value not in (None, False, True):  # 0 and 1 are equal to two of these
        raise SetupError(f"config.json: {declared} is {value!r}; it must be true or false")
    return bool(value)


def names(raw: Mapping[str, Any], name: str) -> list[str]:
    """The list of names `name`, empty if there is none; SetupError if it is something else."""
    value = raw.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise SetupError(f"config.json: {name} is {value!r}; it must be a list of names")
    return value
