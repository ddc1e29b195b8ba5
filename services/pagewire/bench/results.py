"""Files of results, with the commit, machine and versions that they come from."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagewire.cli.errors import CommandError

_PACKAGES = ("pagewire", "torch", "triton", "transformers", "grpcio", "numpy")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result with its date, commit, machine and versions."""
    write_file(path, json.dumps({**result, **provenance()}, indent=2) + "\n")


def write_file(path: Path, text: str) -> None:
    """Writes a file and makes its folders; CommandError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error


def provenance() -> dict[str, Any]:
    """The date, commit, machine and versions of a measurement that is made now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _commit() -> str | None:
    """The commit of this source, with `+` if it was changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--dirty=+", "--exclude=*"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
