"""The services of Pagewire that run on this machine, found in /proc."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.cli.settings.settings import settings_of
from pagewire.config import (
    GatewayConfig,
    ProcessConfig,
    SchedulerConfig,
    SimulatedWorkerConfig,
    WorkerConfig,
)

SERVICES: Mapping[str, type[ProcessConfig] | None] = {
    "run": None,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "simulated-worker": SimulatedWorkerConfig,
}
_PROC = Path("/proc")
_MODULE = "pagewire.cli.main"


@dataclass(frozen=True, slots=True)
class RunningService:
    """One process.

    `values` are its settings, from its flags and environment, otherwise the defaults. The
    environment of another user's process cannot be read: then only flags count.
    """

    kind: str
    pid: int
    values: Mapping[str, Any]
    seconds: float
    resident_bytes: int


def running_services() -> list[RunningService]:
    """The services in the order of their kinds, then by process id."""
    found = [
        service
        for entry in _PROC.iterdir()
        if entry.name.isdigit() and (service := _service(entry)) is not None
    ]
    order = list(SERVICES)
    return sorted(found, key=lambda service: (order.index(service.kind), service.pid))


def _service(entry: Path) -> RunningService | None:
    """The service of a process; None if it is not a service, or has ended meanwhile."""
    try:
        words = (entry / "cmdline").read_text(errors="replace").split("\0")[:-1]
        arguments = _arguments(words)
        if not arguments or arguments[0] not in SERVICES:
            return None
        environment = _environment(entry)
        seconds = time.time() - entry.stat().st_ctime
        pages = int((entry / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    kind = arguments[0]
    return RunningService(
        kind=kind,
        pid=int(entry.name),
        values=_values(SERVICES[kind], arguments[1:], environment),
        seconds=seconds,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def _arguments(words: Sequence[str]) -> Sequence[str]:
    """The arguments of a `pagewire` command; empty for others, also for `sudo pagewire ...`."""
    program = Path(words[0]).name if words else ""
    if program != "pagewire" and not program.startswith(("python", "pypy")):
        return ()
    for index, word in enumerate(words[:4]):
        if word == _MODULE or Path(word).name == "pagewire":
            # Helper processes have the name of the module in a longer word.
            return words[index + 1 :]
    return ()


def _environment(entry: Path) -> dict[str, str]:
    """Only the variables of settings; the others include secrets."""
    try:
        pairs = (entry / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if pair.startswith("PAGEWIRE_"))


def _values(
    config: type[ProcessConfig] | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if config is None:
        return values
    words = iter(arguments)
    flags: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        flags[name] = value if separator else ""
        if not separator and word.startswith("--"):
            flags[name] = next(words, "")
    for setting in settings_of(config).values():
        text = flags.get(setting.flag, environment.get(setting.env))
        values[setting.name] = setting.default
        if text is not None and setting.kind is not bool:
            try:
                values[setting.name] = setting.parse(text)
            except ValueError:
                continue
    return values
