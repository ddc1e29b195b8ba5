"""The installations of `make`: the decisions of the Makefile and of tools/install.py."""

import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.install import has_gpu, is_reachable, torch_arguments

ROOT = Path(__file__).parents[3]
TORCH = "torch==2.13.0 triton==3.7.1"
INDEX = "https://download.pytorch.org/whl/cpu"


def never() -> bool:
    raise AssertionError("the index is not asked")


def test_a_machine_without_gpu_gets_the_cpu_build() -> None:
    arguments, sentence = torch_arguments(TORCH, INDEX, False, lambda: True)
    assert arguments == ["--extra-index-url", INDEX, "torch==2.13.0", "triton==3.7.1"]
    assert "CPU build from https://download.pytorch.org/whl/cpu" in sentence


def test_a_machine_with_gpu_gets_what_pip_offers() -> None:
    arguments, sentence = torch_arguments(TORCH, INDEX, True, never)
    assert arguments == ["torch==2.13.0", "triton==3.7.1"]
    assert "CUDA build" in sentence


def test_an_index_that_cannot_be_reached_is_said() -> None:
    arguments, sentence = torch_arguments(TORCH, INDEX, False, lambda: False)
    assert arguments == ["torch==2.13.0", "triton==3.7.1"]
    assert f"{INDEX} cannot be reached" in sentence
    assert "TORCH_INDEX=" in sentence


def test_no_index_and_no_torch_are_choices() -> None:
    assert torch_arguments(TORCH, "", False, never)[0] == ["torch==2.13.0", "triton==3.7.1"]
    assert torch_arguments("  ", INDEX, False, never)[0] == []


@pytest.mark.parametrize(
    ("devices", "listing", "expected"),
    [
        ([], None, False),
        (["null", "nvidia-caps", "nvidiactl"], None, False),
        (["nvidia0"], None, True),
        ([], "GPU 0: NVIDIA H100 (UUID: GPU-1)", True),
        ([], "No devices were found", False),
        ([], "failed", False),
    ],
)
def test_a_gpu_is_a_device_file_or_listed(
    tmp_path: Path, devices: list[str], listing: str | None, expected: bool
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    program = None
    if listing is not None:
        program = tmp_path / "nvidia-smi"
        status = 9 if listing == "failed" else 0
        program.write_text(f"#!/bin/sh\necho '{listing}'\nexit {status}\n")
        program.chmod(0o755)
    assert has_gpu(tmp_path, lambda _: None if program is None else str(program)) is expected


class Index(http.server.BaseHTTPRequestHandler):
    """An index that has torch only."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_index_is_reachable_if_it_has_torch(index: str) -> None:
    assert is_reachable(f"{index}/whl/cpu")
    assert is_reachable(f"{index}/whl/cpu/")
    assert not is_reachable(f"{index}/other")
    assert not is_reachable("http://127.0.0.1:9/whl/cpu")
    assert not is_reachable("no URL")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that make reads, without an environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    return tmp_path


def outside_make() -> dict[str, str]:
    """The environment without the variables of a make that runs the tests."""
    variables = {"ARGS", "TORCH", "TORCH_INDEX", "VENV_FLAGS"}
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("MAKE") and name not in variables
    }


def planned(folder: Path, target: str, *variables: str) -> list[str]:
    """The commands that make would run."""
    done = subprocess.run(
        ["make", "-n", target, *variables],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env=outside_make(),
    )
    return [line for line in done.stdout.splitlines() if "sys.version_info" not in line]


def mark(folder: Path, name: str) -> None:
    """A marker that is newer than pyproject.toml."""
    os.utime(folder / "pyproject.toml", (time.time() - 60,) * 2)
    (folder / ".venv" / name).touch()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_installs_what_a_target_needs(checkout: Path) -> None:
    for target, what in (("run", "run"), ("demo", "run"), ("test", "dev"), ("check", "dev")):
        install = planned(checkout, target)[0]
        assert "tools/install.py" in install
        assert install.endswith(f" {what}")
        assert f"--torch '{TORCH}' --torch-index '{INDEX}'" in install
    mark(checkout, "runnable")
    assert planned(checkout, "run", "ARGS=--port 1") == [".venv/bin/pagewire run --port 1"]
    assert planned(checkout, "test")[0].endswith(" dev"), "developer tools come with their target"
    mark(checkout, "installed")
    for target in ("run", "test"):
        assert "install.py" not in planned(checkout, target)[0]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_an_environment_for_developers_is_enough_to_run(checkout: Path) -> None:
    mark(checkout, "installed")
    assert planned(checkout, "run") == [".venv/bin/pagewire run "]
    os.utime(checkout / "pyproject.toml", (time.time() + 60,) * 2)
    assert planned(checkout, "run")[0].endswith(" dev"), "it stays one for developers"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_passes_its_variables_on(checkout: Path) -> None:
    variables = ("TORCH=torch>=2.11", "TORCH_INDEX=http://x/cpu", "VENV_FLAGS=--copies")
    install = planned(checkout, "run", *variables)[0]
    assert "--torch 'torch>=2.11' --torch-index 'http://x/cpu' --venv-flags '--copies'" in install


def test_another_system_hears_what_works_there() -> None:
    pretend = "import platform; platform.system = lambda: 'Darwin'"
    script = f"{pretend}; from tools.install import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "this is macOS. What works here:" in done.stderr
    assert "docker compose up --build" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_an_installation_shows_its_progress_and_ends_with_the_marker(tmp_path: Path) -> None:
    """The real script with a package of a line, and no torch."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "backend.py").write_text(BACKEND)
    done = subprocess.run(
        ["make", ".venv/runnable", "TORCH=", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=outside_make(),
    )
    if "ensurepip" in done.stdout + done.stderr and done.returncode != 0:
        pytest.skip("this Python cannot make environments")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert steps[0] == "== 1 of 3: making .venv"
    assert steps[1] == "== 2 of 3: torch: the one that is there already"
    assert steps[2] == "== 3 of 3: Pagewire and what running it needs"
    assert steps[3].startswith("== installed in ")
    assert "Successfully installed nothing" in done.stdout, "pip is heard"
    assert (tmp_path / ".venv" / "runnable").is_file()
    assert not (tmp_path / ".venv" / "installed").exists()


# A build backend without dependencies: an editable wheel that holds metadata only.
BACKEND = """
import zipfile

INFO = "nothing-1.dist-info/"


def get_requires_for_build_editable(config_settings=None):
    return []


def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "nothing-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr(INFO + "METADATA", "Metadata-Version: 2.1\\nName: nothing\\nVersion: 1\\n"
                       "Provides-Extra: all\\n")
        wheel.writestr(INFO + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
                       "Tag: py3-none-any\\n")
        wheel.writestr(INFO + "RECORD", "")
    return name


build_wheel = build_editable
"""
