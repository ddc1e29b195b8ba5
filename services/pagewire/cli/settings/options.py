"""Turns settings into the options of a command."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.settings.config_file import read_config_file
from pagewire.cli.settings.settings import Setting

_CONFIG_HELP = (
    "YAML or JSON file of settings, one `name: value` for each, names with underscores. Flags and "
    "environment variables override it."
)


def configured(settings: Mapping[str, Setting]) -> Callable[[Callable[..., Any]], Any]:
    """Gives a command one option for each setting, in addition to its own parameters.

    The function gets `values`, a dict with the value of every setting. A flag overrides the
    environment variable, which overrides the file given with --config, which overrides the default.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            path = given.pop("config")
            raw = {name: given.pop(name) for name in settings}
            return function(values=_values(settings, raw, path), **given)

        _set_signature(command, function, settings)
        return command

    return decorate


def _values(
    settings: Mapping[str, Setting], raw: Mapping[str, Any], path: Path | None
) -> dict[str, Any]:
    values = {name: setting.default for name, setting in settings.items()}
    if path is not None:
        values |= _read(path, settings)
    for name, text in raw.items():
        if text is not None:
            values[name] = text if isinstance(text, bool) else _parse(settings[name], text)
    return values


def _read(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    try:
        return read_config_file(path, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error


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
) -> None:
    """Shows typer the function's own parameters, then --config, then an option for each
    setting."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.name != "values"]
    config_file = _parameter("config", Path, typer.Option(help=_CONFIG_HELP, metavar="FILE"))
    generated = [config_file, *(_option(setting) for setting in settings.values())]
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


def _parameter(name: str, kind: type, option: Any) -> inspect.Parameter:
    """An option that is None unless given. Texts are not parsed by typer, so that flags,
    environment and files have the same rules and error messages."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
