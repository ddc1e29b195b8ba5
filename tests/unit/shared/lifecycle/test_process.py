"""The process of a service and its signals."""

import signal
import subprocess
import sys

CODE = """
from pagewire.lifecycle.logs import configure
from pagewire.lifecycle.process import run_service

async def main(stop):
    print("serving", flush=True)
    await stop.wait()

configure("service", "info")
run_service(main)
"""


def test_sighup_does_not_end_a_service_without_keys() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "serving\n"
        process.send_signal(signal.SIGHUP)
        assert "SIGHUP: this process has no API keys to read again" in process.stderr.readline()
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
