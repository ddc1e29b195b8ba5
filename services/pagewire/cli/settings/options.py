"""Turns settings into the options of a command."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.settings.config_file import MODELS, read_config_file
from pagewire.cli.settings.model_entries import parse_entry, with_models
from pagewire.cli.settings.settings import Setting

_CONFIG_HELP = (
    "YAML or JSON file of settings, one `name: value` for each, names with underscores. Flags and "
    "environment variables override it."
)
_MODELS_HELP = (
    "{} Give NAME=MODEL to choose its name in requests, several times to serve several models. "
    "NAME=MODEL,SETTING=VALUE gives a model settings of its own, such as workers=2."
)


def configured(
    settings: Mapping[str, Setting], model_settings: Mapping[str, Setting] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Adds one option for each setting to a command, beside its own parameters.

    The function gets `values`, a dict with the value of every setting. A flag overrides the
    environment variable, which overrides the file given with --config, which overrides the default.

    `model_settings` are the settings that a model may set for itself. With them, --model may be
    given several times, and a file may have `models`. Then `values` has `models`, see
    `with_models`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            path = given.pop("config")
            raw = {name: given.pop(name) for name in settings}
            texts = raw.pop("model") if model_settings is not None else None
            values = _values(settings, raw, path, model_settings)
            if model_settings is not None:
                values = _with_models(values, texts or (), settings["model"], model_settings)
            return function(values=values, **given)

        _set_signature(command, function, settings, model_settings is not None)
        return command

    return decorate


def _values(
    settings: Mapping[str, Setting],
    raw: Mapping[str, Any],
    path: Path | None,
    model_settings: Mapping[str, Setting] | None,
) -> dict[str, Any]:
    values = {name: setting.default for name, setting in settings.items()}
    if path is not None:
        values |= _read(path, settings, model_settings)
    for name, text in raw.items():
        if text is not None:
            values[name] = text if isinstance(text, bool) else _parse(settings[name], text)
    return values


def _read(
    path: Path, settings: Mapping[str, Setting], model_settings: Mapping[str, Setting] | None
) -> dict[str, Any]:
    try:
        return read_config_file(path, settings, model_settings)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error


def _with_models(
    values: Mapping[str, Any],
    texts: Sequence[str],
    model: Setting,
    model_settings: Mapping[str, Setting],
) -> dict[str, Any]:
    """The values with the models of flags or environment, else of the file, else the default."""
    values = dict(values)
    in_file = values.pop(MODELS, None)
    try:
        if texts:
            given = _models_given(texts, model.env)
            entries = [parse_entry(text, model_settings) for text in given]
        else:
            entries = in_file or [parse_entry(values["model"], model_settings)]
        return with_models(values, entries)
    except ValueError as error:
        hint = "--config" if in_file and not texts else f"{model.flag} (or {model.env})"
        raise typer.BadParameter(str(error), param_hint=hint) from error


def _models_given(texts: Sequence[str], variable: str) -> Sequence[str]:
    """The texts of the option. typer splits a variable at spaces, but a folder may have spaces."""
    whole = os.environ.get(variable, "")
    split = list(texts) == whole.split()
    return [whole] if split and Path(whole).expanduser().is_dir() else texts


def _parse(setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        hint = f"{setting.flag} (or {setting.env})"
        raise typer.BadParameter(str(error), param_hint=hint) from error


def _set_signature(
    command: Callable[..., Any],
    function: Callable[..., Any],
    settings: Mapping[str, Setting],
    several_models: bool,
) -> None:
    """Shows typer the function's own parameters, then --config, then an option for each
    setting."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.name != "values"]
    config_file = _parameter("config", Path, typer.Option(help=_CONFIG_HELP, metavar="FILE"))
    options = {name: _option(setting) for name, setting in settings.items()}
    if several_models:
        options["model"] = _models_option(settings["model"])
    generated = [config_file, *options.values()]
    parameters = [*own, *generated]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _option(setting: Setting) -> inspect.Parameter:
    common: dict[str, Any] = {
        "envvar": setting.env,
        "help": setting.help,
        "show_default": False if setting.default is None else str(setting.default),
    }
    if setting.kind is bool:
        flags = f"{setting.flag}/--no-{setting.flag[2:]}"
        return _parameter(setting.name, bool, typer.Option(flags, **common))
    option = typer.Option(setting.flag, metavar=setting.metavar, **common)
    return _parameter(setting.name, str, option)


def _models_option(setting: Setting) -> inspect.Parameter:
    option = typer.Option(
        setting.flag,
        envvar=setting.env,
        help=_MODELS_HELP.format(setting.help),
        show_default=str(setting.default),
        metavar="MODEL|NAME=MODEL,SETTING=VALUE",
    )
    return _parameter(setting.name, list[str], option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """An option that is None unless given. typer does not parse the texts, so that flags,
    environment and files have the same rules and error messages."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
