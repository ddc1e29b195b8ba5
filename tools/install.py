"""Makes .venv for `make`, with the packages for running or also those for developers.

    python tools/install.py run|dev [--torch REQUIREMENTS] [--torch-index URL] [--venv-flags FLAGS]

Needs only Python's standard library, and shows pip's progress. Ends with a marker file in .venv,
which `make` checks: `runnable` for running, `installed` for developers.

On a machine without an NVIDIA GPU, torch comes from PyTorch's index of CPU builds, because the
build at PyPI has two gigabytes of CUDA. If that index cannot be reached, pip uses its other
indexes.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

VENV = Path(".venv")
MARKERS = {"run": "runnable", "dev": "installed"}
EXTRAS = {"run": "all", "dev": "dev"}
PURPOSES = {"run": "what running it needs", "dev": "what it and its developers need"}
TIMEOUT_SECONDS = 5.0
# pip prints nothing while it copies files, which lasts a minute for torch.
SILENT_SECONDS = 20.0

NOT_LINUX = """Pagewire's services run on Linux; this is {system}. What works here:
  - docker compose up --build     everything in containers, on the CPU, if Docker runs here
  - a Linux machine or VM         `make run` there; any client of OpenAI's API here, with its URL"""


def main() -> None:
    """Installs, and prints each step."""
    given = parse_arguments()
    if platform.system() != "Linux":
        sys.exit(NOT_LINUX.format(system=describe_system(platform.system())))
    began = time.monotonic()
    python = str(VENV / "bin" / "python")
    flags = shlex.split(given.venv_flags)
    step(1, f"making {VENV}")
    run([sys.executable, "-m", "venv", *flags, str(VENV)])
    arguments, sentence = torch_arguments(
        given.torch, given.torch_index, has_gpu(), lambda: is_reachable(given.torch_index)
    )
    step(2, sentence)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    if arguments:
        run([*pip, *arguments])
    step(3, f"Pagewire and {PURPOSES[given.what]}")
    run([*pip, "--editable", f".[{EXTRAS[given.what]}]"])
    (VENV / MARKERS[given.what]).touch()
    print(f"== installed in {time.monotonic() - began:.0f} s", flush=True)


def torch_arguments(
    torch: str, index: str, gpu: bool, reachable: Callable[[], bool]
) -> tuple[list[str], str]:
    """pip's arguments to install torch, empty for none, and a sentence about it."""
    requirements = shlex.split(torch)
    if not requirements:
        return [], "torch: the one that is there already"
    named = " ".join(requirements)
    if gpu:
        return requirements, f"{named}, the CUDA build: there is an NVIDIA GPU"
    if not index:
        return requirements, f"{named}, from where pip looks"
    if not reachable():
        return requirements, (
            f"{named}, from where pip looks: {index} cannot be reached. PyPI's build brings CUDA, "
            "about 2 GB; name another index of CPU builds with TORCH_INDEX="
        )
    # An additional index: pip prefers 2.13.0+cpu to 2.13.0, and finds triton at PyPI.
    return ["--extra-index-url", index, *requirements], (
        f"{named}, the CPU build from {index}: there is no NVIDIA GPU"
    )


def has_gpu(
    devices: Path = Path("/dev"), which: Callable[[str], str | None] = shutil.which
) -> bool:
    """Whether there is an NVIDIA GPU: a device file, or one that nvidia-smi lists."""
    if any(path.name[6:].isdigit() for path in devices.glob("nvidia*")):
        return True
    program = which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def is_reachable(index: str) -> bool:
    """Whether an index of packages answers; pip would try for minutes."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=TIMEOUT_SECONDS) as page:
            return bool(page.status == 200)
    except (OSError, ValueError):
        return False


def describe_system(name: str) -> str:
    """The name of the index for users."""
    return {"Darwin": "macOS"}.get(name, name)


def step(number: int, what: str) -> None:
    """Prints the current step."""
    print(f"== {number} of 3: {what}", flush=True)


def run(command: Sequence[str]) -> None:
    """Runs a command whose output is shown; ends with its status if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "PIP_NO_INPUT": "1"})
    while True:
        try:
            status = process.wait(SILENT_SECONDS)
            break
        except subprocess.TimeoutExpired:
            print(f"   ... {time.monotonic() - began:.0f} s so far", flush=True)
        except KeyboardInterrupt:
            process.wait()
            raise
    if status != 0:
        sys.exit(f"make: {shlex.join(command)} ended with status {status}; see above")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(MARKERS))
    parser.add_argument("--torch", default="")
    parser.add_argument("--torch-index", default="")
    parser.add_argument("--venv-flags", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
