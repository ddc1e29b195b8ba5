"""`pagewire run` whose log cannot be written, or that gets SIGHUP, keeps serving."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from pagewire.cli.launch.ports import free_port
from support.waiting import until

PROGRAM = Path(__file__).parents[3] / "examples" / "command_model.py"


@contextmanager
def run(output: int, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A stack whose log and output go to `output`, with its URL; it must end well on SIGTERM."""
    port = free_port()
    command = [sys.executable, "-m", "pagewire.cli.main", "run", "--backend", "command"]
    command += ["--command", f"{sys.executable} {PROGRAM}", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", *flags], stdout=subprocess.DEVNULL, stderr=output
    )
    os.close(output)
    try:
        yield process, f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(30) in (0, 120)  # 120: Python could not write its last line
    finally:
        process.kill()


def is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether the stack is ready; fails if it has ended."""
    assert process.poll() is None
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("fault", ["disk full", "reader gone"])
def test_a_log_that_cannot_be_written_disturbs_no_service(log_format: str, fault: str) -> None:
    if fault == "disk full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    with run(output, "--log-format", log_format) as (process, url):
        until(lambda: is_ready(process, url), 60)
        body = {"prompt": "the fox", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def test_sighup_makes_the_services_of_a_stack_read_the_keys_again(tmp_path: Path) -> None:
    old, new, keys, log = new_key(), new_key(), tmp_path / "keys.yaml", tmp_path / "log"
    keys.write_text(entry_of("old", old, None, RateLimits()))

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code

    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    with run(output, "--api-keys-file", str(keys)) as (process, url):
        until(lambda: is_ready(process, url), 60)
        assert (status(old), status(new)) == (200, 401)
        keys.write_text(entry_of("new", new, None, RateLimits()))
        before = log.read_text().count("1 API keys")
        process.send_signal(signal.SIGHUP)
        until(lambda: log.read_text().count("1 API keys") == before + 2)  # gateway and scheduler
        assert (status(old), status(new)) == (401, 200)
        assert "has no API keys to read again" in log.read_text()
    assert "SIGHUP;" not in log.read_text()  # no service has been restarted
