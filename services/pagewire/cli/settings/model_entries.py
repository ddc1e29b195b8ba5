"""The models of one command: `--model` given several times, or `models` in a configuration file.

A text is [NAME=]MODEL[,SETTING=VALUE...]. In a file, `models` has a mapping of settings for each
name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.cli.settings.settings import Setting, nearest_setting
from pagewire.models import served_name

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model: its name in requests, its source, and its own settings.

    `named`: whether the user gave the name; otherwise the name follows from the source.
    """

    name: str
    source: str
    named: bool
    settings: Mapping[str, Any]


def parse_entry(text: str, settings: Mapping[str, Setting]) -> ModelEntry:
    """The entry of a text; `settings` are the settings that a model may have.

    A text that is an existing folder, or that has neither a name nor settings, is the source alone.
    ValueError names the wrong part.
    """
    if "=" not in text or Path(text).expanduser().is_dir():
        return ModelEntry(served_name(text, None), text, False, {})
    head, *parts = text.split(",")
    name, separator, source = head.partition("=")
    if not separator:
        name, source = served_name(head, None), head
    _check_name(name)
    if not source:
        raise ValueError(f"{text!r} has no model after the name {name!r}; give NAME=MODEL")
    values: dict[str, Any] = {}
    for part in parts:
        key, has_value, value = part.partition("=")
        if not has_value:
            raise ValueError(
                f"{part!r} of the model {name!r} has no value; give SETTING=VALUE. A path with a "
                "comma goes into `models` of a file given with --config"
            )
        setting = _setting(name, key, settings)
        if setting.name in values:
            raise ValueError(f"the model {name!r} has {setting.name} twice; give it once")
        values[setting.name] = _parsed(name, setting, value)
    return ModelEntry(name, source, bool(separator), values)


def read_entries(raw: Any, settings: Mapping[str, Setting]) -> list[ModelEntry]:
    """The entries of a file's `models`; ValueError names the wrong model."""
    if not isinstance(raw, dict) or not raw:
        raise ValueError("models must hold a mapping of settings for each name of a model")
    return [_read_entry(str(name), own, settings) for name, own in raw.items()]


def with_models(values: Mapping[str, Any], entries: Sequence[ModelEntry]) -> dict[str, Any]:
    """Values with a model or several.

    A single model's own settings are merged into the values. Several models are in `models`, a
    tuple with the own settings of each. ValueError if two names are equal or one is not valid.
    """
    name = values["served_model_name"]
    if name and (len(entries) > 1 or entries[0].named):
        raise ValueError(
            f"--served-model-name {name} is for a single model without a name; "
            "give NAME=MODEL instead"
        )
    if len(entries) == 1:
        [entry] = entries
        own_name = {"served_model_name": entry.name} if entry.named else {}
        return {**values, "model": entry.source, **own_name, **entry.settings}
    _check_names(entries)
    own = (
        {"model": each.source, "served_model_name": each.name, **each.settings} for each in entries
    )
    return {**values, "models": tuple(own)}


def _check_names(entries: Iterable[ModelEntry]) -> None:
    sources: dict[str, str] = {}
    for entry in entries:
        _check_name(entry.name)
        if entry.name in sources:
            raise ValueError(
                f"two models have the name {entry.name!r}: {sources[entry.name]} and "
                f"{entry.source}; give each another one, as NAME=MODEL"
            )
        sources[entry.name] = entry.source


def _read_entry(name: str, raw: Any, settings: Mapping[str, Setting]) -> ModelEntry:
    _check_name(name)
    if not isinstance(raw, dict):
        raise ValueError(f"the model {name!r} must have settings as `key: value`, such as model")
    source = raw.get("model")
    if not isinstance(source, str) or not source:
        raise ValueError(
            f"the model {name!r} has no key `model`; give it a folder, or org/name of the hub"
        )
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "model" or value is None:
            continue
        setting = _setting(name, str(key), settings)
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"the model {name!r}: {setting.name} must be a single value")
        values[setting.name] = _parsed(name, setting, str(value))
    return ModelEntry(name, source, True, values)


def _check_name(name: str) -> None:
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot name a model; give NAME=MODEL with a name of at most {_MAX_NAME} "
            "letters, digits and . _ : / - that begins with a letter or a digit"
        )


def _setting(name: str, key: str, settings: Mapping[str, Setting]) -> Setting:
    found = settings.get(key.strip().removeprefix("--").replace("-", "_"))
    if found is None:
        raise ValueError(
            f"the model {name!r} cannot have a setting {key!r} of its own; "
            f"{nearest_setting(key, settings)}"
        )
    return found


def _parsed(name: str, setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ValueError(f"the model {name!r}: {setting.name}: {error}") from None
