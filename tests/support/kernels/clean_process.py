"""A process in which Triton compiles: the tests' own may run kernels under its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def report_of(script: Path) -> Any:
    """What `script` prints as JSON when it is run without TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # As here, where pytest has put the tests' own modules on the path.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
