"""`pagewire run` as a user starts it: real processes, by default the embedded model."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pagewire.models import EMBEDDED, resolve_model
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.waiting import until

EMBEDDED_FOLDER = resolve_model(EMBEDDED)


@dataclass
class RunningStack:
    """A started stack: `log` has its services' lines, `output` the text printed when ready."""

    process: subprocess.Popen[str]
    url: str = ""
    grpc_address: str = ""
    output: str = ""
    log: list[str] = field(default_factory=list)

    def pids(self, service: str) -> list[int]:
        """Ids of the processes that run a service."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (words := _command(entry)):
                is_child = _parent(entry) == self.process.pid
                if is_child and service in words:
                    found.append(int(entry.name))
        return found

    def kill_worker(self) -> None:
        """Kills the only worker, which restarts."""
        self.kill("worker")

    def kill(self, service: str) -> None:
        """Kills the only process of a service, which restarts."""
        [process] = self.pids(service)
        os.kill(process, signal.SIGKILL)


def is_idle(stub: inference_pb2_grpc.InferenceStub) -> bool:
    """Whether the scheduler has no request and no block is in use."""
    load = stub.GetLoad(pb.GetLoadRequest())
    return (load.running, load.waiting, load.used_blocks) == (0, 0, 0)


@contextmanager
def running_stack(*flags: str, model: Path | str = EMBEDDED) -> Iterator[RunningStack]:
    """Starts a stack on free ports, waits until it is ready, and ends it with SIGINT."""
    command = [sys.executable, "-m", "pagewire.cli.main", "run", "--model", str(model)]
    command += ["--port", "0", "--grpc-port", "0", "--num-blocks", "600", "--num-slots", "32"]
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    stack = RunningStack(process)
    output: list[str] = []
    readers = [
        threading.Thread(target=_collect, args=(process.stderr, stack.log), daemon=True),
        threading.Thread(target=_collect, args=(process.stdout, output), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        until(lambda: process.poll() is not None or "gRPC: " in "".join(output), 90)
        text = "".join(output)
        assert process.poll() is None, "".join(stack.log)
        stack.url = re.search(r"at (https?://\S+)", text)[1]
        stack.output = text
        stack.grpc_address = re.search(r"gRPC: (\S+)", text)[1]
        yield stack
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert process.returncode == 0, "".join(stack.log)


def _collect(pipe: IO[str], lines: list[str]) -> None:
    lines.extend(pipe)


def _command(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1
