"""What the control plane's images lack: it must run without it."""

import subprocess
import sys

import pytest

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
    code = _IMPORT.format(module="pagewire.worker.server", absent=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr
