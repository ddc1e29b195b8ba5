"""A process in which Triton compiles, since the tests may run kernels in its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def report_of(script: Path) -> Any:
    """Run `script` without TRITON_INTERPRET and return the JSON that it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Pytest has added the tests' folders to the path of this process; the child needs them too.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
