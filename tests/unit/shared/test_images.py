"""What the control plane's images lack: it must run without it."""

import subprocess
import sys

import pytest

_IMPORT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"{{name}} is not in this image", name=name)

sys.meta_path.insert(0, Absent())
import {module}
"""

HEAVY = ("torch", "triton", "transformers", "safetensors")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pagewire.gateway.server", (*HEAVY, "tokenizers", "jinja2")),
        ("pagewire.scheduler.server", (*HEAVY, "fastapi", "uvicorn", "pydantic")),
        ("pagewire.simulator.worker", (*HEAVY, "tokenizers", "fastapi", "uvicorn", "pydantic")),
        ("pagewire.cli.main", (*HEAVY, "tokenizers", "fastapi", "uvicorn", "aiohttp")),
    ],
)
def test_a_service_starts_without(module: str, absent: tuple[str, ...]) -> None:
    code = _IMPORT.format(module=module, absent=absent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail() -> None:
    code = _IMPORT.format(module="pagewire.worker.server", absent=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is not in this image" in done.stderr
