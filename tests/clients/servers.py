"""The servers for the libraries: processes of the project's own environment."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PAGEWIRE_PYTHON", ROOT / ".venv/bin/python"))

# Names of their models.
TEXT = "text"
EMBEDDED = "pagewire-chat"


@dataclass(frozen=True)
class Servers:
    """URLs: of a model that writes the text that the prompt asks for, and of the embedded model,
    which supports structured output.
    """

    text: str
    embedded: str


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Starts the servers, and ends them after the block."""
    process = subprocess.Popen(
        [PYTHON, "-m", "support.clients.library_servers"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Servers(**json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.wait()
