"""Configuration files in YAML or JSON, with one key for each setting."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.cli.settings.model_entries import ModelEntry, read_entries
from pagewire.cli.settings.settings import Setting, nearest_setting
from pagewire.config.yaml_files import once_each, parse_yaml

# The key of a list of models.
MODELS = "models"


def read_config_file(
    path: Path,
    settings: Mapping[str, Setting],
    model_settings: Mapping[str, Setting] | None = None,
) -> dict[str, Any]:
    """The parsed values of a file. A null leaves the setting at its default.

    With `model_settings`, the file may have `models`; its value is then a list of ModelEntry.
    ValueError names the file, the key and the remedy.
    """
    values: dict[str, Any] = {}
    for key, raw in _read_mapping(path).items():
        if key == MODELS and model_settings is not None:
            values[MODELS] = _read_models(path, raw, model_settings)
            continue
        if key not in settings:
            raise ValueError(f"{path}: unknown key {key!r}; {nearest_setting(str(key), settings)}")
        if raw is not None:
            values[key] = _parse(path, settings[key], raw)
    if MODELS in values and "model" in values:
        raise ValueError(f"{path}: has both model and models; keep one of them")
    return values


def _read_models(path: Path, raw: Any, settings: Mapping[str, Setting]) -> list[ModelEntry]:
    try:
        return read_entries(raw, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml  # here, so that commands without a file start faster

    try:
        text = path.read_text()
        # A JSON file is not read as YAML, because YAML 1.1 reads 1e-5 as text.
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=once_each)
        else:
            content = parse_yaml(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
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


def _name(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else type(value).__name__
