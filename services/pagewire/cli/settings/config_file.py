"""Configuration files in YAML or JSON, with one key for each setting."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.cli.settings.settings import Setting


def read_config_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The parsed values of a file. A null leaves the setting at its default.

    ValueError names the file, the key and the remedy.
    """
    values = {}
    for key, raw in _read_mapping(path).items():
        if key not in settings:
            raise ValueError(f"{path}: unknown key {key!r}; {_nearest(str(key), settings)}")
        if raw is not None:
            values[key] = _parse(path, settings[key], raw)
    return values


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml  # here, so that commands without a file start faster

    try:
        text = path.read_text()
        # A JSON file is not read as YAML, because YAML 1.1 reads 1e-5 as text.
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        # Parsers' messages have several lines.
        raise ValueError(f"{path}: not valid: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold settings as `key: value`, not a {_name(content)}")
    return content


def _parse(path: Path, setting: Setting, raw: Any) -> Any:
    if not isinstance(raw, (bool, int, float, str)):
        raise ValueError(f"{path}: {setting.name} must be a single value, not a {_name(raw)}")
    try:
        return setting.parse(str(raw))
    except ValueError as error:
        raise ValueError(f"{path}: {setting.name}: {error}") from None


def _nearest(key: str, settings: Mapping[str, Setting]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), settings, n=1, cutoff=0.5)
    if near:
        return f"the nearest valid one is {near[0]!r}"
    return f"valid ones are {', '.join(sorted(settings))}"


def _name(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else type(value).__name__
