"""Envoy's configuration, checked by Envoy itself."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


def find_envoy() -> str | None:
    """Envoy on the path, or in the environment that runs the tests."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(find_envoy() is None, reason="no envoy on the path; the image has one")
def test_envoy_accepts_its_configuration_without_a_warning() -> None:
    command = [str(find_envoy()), "--mode", "validate", "--log-level", "warning", "-c", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "[warning]" not in output, output
