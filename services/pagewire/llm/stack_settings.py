"""The settings of the processes that an LLM starts: those of `pagewire run` without HTTP."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.cli.launch.stack import control_settings
from pagewire.cli.settings.settings import Setting, settings_of
from pagewire.config import GatewayConfig
from pagewire.limits import INT32_MAX
from pagewire.llm.params import suggestion
from pagewire.models import EMBEDDED

# How the caller of the scheduler resumes requests, as a gateway does.
_RESUMPTION = ("resume_timeout", "max_resumes")
# The scheduler has one caller, on a socket in a private folder, and refuses no call from it.
_WITHOUT = ("grpc_host", "grpc_port", "api_keys_file")
_DEFAULTS = {
    "log_level": "warning",
    "max_waiting_requests": INT32_MAX,
    "max_waiting_tokens": 1 << 62,
    "max_waiting_seconds": math.inf,
    # A large model takes minutes to load again.
    "resume_timeout": 1800.0,
}


def llm_settings() -> dict[str, Setting]:
    """The settings of an LLM, by name."""
    found = {name: s for name, s in control_settings().items() if name not in _WITHOUT}
    gateway = settings_of(GatewayConfig)
    found.update((name, gateway[name]) for name in _RESUMPTION)
    return {
        name: replace(setting, default=_DEFAULTS.get(name, setting.default))
        for name, setting in found.items()
    }


def stack_values(model: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every setting: the given one, else the environment's, else the default.

    TypeError names an unknown setting, ValueError a setting with an invalid value.
    """
    settings = llm_settings()
    for name in given:
        if name not in settings:
            raise TypeError(f"{name} is not a setting of an LLM{suggestion(name, settings)}")
    chosen = {**given, "model": str(model)} if model is not None else dict(given)
    chosen.setdefault("model", os.environ.get(settings["model"].env, EMBEDDED))
    return {
        name: _checked(setting, chosen[name]) if name in chosen else _usual(setting)
        for name, setting in settings.items()
    }


def _usual(setting: Setting) -> Any:
    text = os.environ.get(setting.env)
    return setting.default if text is None else _parsed(setting, text, setting.env)


def _checked(setting: Setting, value: Any) -> Any:
    if value is None and setting.default is None:
        return None
    return _parsed(setting, str(value), setting.name)


def _parsed(setting: Setting, text: str, where: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
