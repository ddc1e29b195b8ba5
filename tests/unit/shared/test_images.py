"""Packages missing in the control plane's images: it must run without them."""

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]

_IMPORT = """
import sys

sys.modules.update(dict.fromkeys({absent!r}))  # an import of these raises ModuleNotFoundError
import {module}
"""

HEAVY = ("torch", "triton")
MODELS = (*HEAVY, "transformers", "huggingface_hub", "safetensors")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pagewire.gateway.server", (*MODELS, "tokenizers", "jinja2")),
        ("pagewire.scheduler.server", (*HEAVY, "fastapi", "uvicorn", "pydantic")),
        ("pagewire.simulator.worker", (*MODELS, "tokenizers", "fastapi", "uvicorn", "pydantic")),
        ("pagewire.cli.main", (*MODELS, "tokenizers", "fastapi", "uvicorn", "aiohttp")),
    ],
)
def test_a_service_starts_without(module: str, absent: tuple[str, ...]) -> None:
    code = _IMPORT.format(module=module, absent=absent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail() -> None:
    code = _IMPORT.format(module="pagewire.worker.runtime.eager", absent=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr


def installed_with(extra: str) -> set[str]:
    """The packages of the image that is made with an extra of pyproject.toml."""
    wanted = subprocess.run(
        [sys.executable, "deploy/requirements.py", extra],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    open_requirements = [Requirement(line) for line in wanted.splitlines()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        for line in requires(requirement.name) or []:
            inner = Requirement(line)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                open_requirements.append(inner)
    return {name for name, _ in seen}


def test_no_package_of_the_control_plane_brings_torch() -> None:
    scheduler, gateway = installed_with("scheduler"), installed_with("gateway")
    assert {"transformers", "tokenizers", "huggingface-hub", "regex"} <= scheduler
    assert not {"torch", "triton", "accelerate"} & (scheduler | gateway)
    assert not {"transformers", "tokenizers"} & gateway
    assert "torch" in installed_with("worker")
