"""Environment variables that look like settings but are not."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.auth.keys import KEYS_VARIABLE
from pagewire.cli.client import KEY_VARIABLE
from pagewire.rpc.credentials import SCHEDULER_TOKEN, WORKER_TOKEN

PREFIX = "PAGEWIRE_"
_SECRETS = (KEY_VARIABLE, KEYS_VARIABLE, SCHEDULER_TOKEN, WORKER_TOKEN)


def without_effect(environment: Mapping[str, str], command: str, root: Any) -> str | None:
    """One line that names the variables without the effect that their names suggest, or None.

    `root` is the command line with all its commands. Variables of other commands are not reported,
    because services may share an environment. But a variable is reported if it is named like a flag
    of this `command` whose own variable has another name.
    """
    named = {name for name in environment if name.startswith(PREFIX)}
    if not named:
        return None
    flags = dict(_variables(root.commands[command].params))
    known = {own for each in _all(root) for _, own in _variables(each.params) if own}.union(
        _SECRETS
    )
    parts = []
    for name in sorted(named):
        own = flags.get(name)
        if own == name or (own is None and name in known):
            continue
        if own is None:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        else:
            near = [own] if own else []
        parts.append(name + "".join(f" (did you mean {other}?)" for other in near))
    return f"not a setting, so it has no effect: {', '.join(parts)}" if parts else None


def _variables(parameters: Iterable[Any]) -> Iterable[tuple[str, str]]:
    """The apparent variable of each flag, and its real one; empty without a real one."""
    for parameter in parameters:
        for flag in parameter.opts:
            if flag.startswith("--"):
                yield PREFIX + flag[2:].upper().replace("-", "_"), parameter.envvar or ""


def _all(command: Any) -> Iterable[Any]:
    yield command
    for sub in getattr(command, "commands", {}).values():
        yield from _all(sub)
