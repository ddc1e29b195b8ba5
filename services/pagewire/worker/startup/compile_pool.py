"""Kernels are compiled in processes of their own while the worker that will launch them starts.

Triton holds the interpreter's lock for most of a compilation, so threads would take turns. This
side needs neither torch nor triton: the pool can start before a worker imports them.
"""

import json
import logging
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewire.config import WorkerConfig
from pagewire.worker.startup.kernel_record import KernelRecord

log = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/dev/nvidiactl")
# Far more than all variants take; then the worker compiles what is missing itself.
TIMEOUT = 120.0
# A worker's jobs are some 100 KiB: collecting them does not wait for the pool's own imports.
PIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel variant to compile."""

    target: tuple[str, int, int]  # backend, architecture and warp size, as in a GPUTarget
    module: str
    kernel: str
    specialization: str  # what JITFunction.preload takes


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a job: the seconds that it took, and what went wrong, if anything did."""

    kernel: str
    seconds: float
    error: str | None


class CompilePool:
    """Fills Triton's cache with what is submitted. It never fails: it may only be of no help."""

    def __init__(self) -> None:
        """Starts `compile_server`, which imports what it needs beside this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pagewire.worker.startup.compile_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
        )
        self._broken = False

    def submit(self, job: Job) -> None:
        """Has a variant compiled; does not wait."""
        if self._broken:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._broken = True

    def finish(self) -> list[Compiled]:
        """Waits until all is compiled, and ends the processes."""
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            log.warning("kernels were not compiled within %g s: the worker goes on alone", TIMEOUT)
            self.close()
            return []
        status = self._process.returncode
        if self._broken or status:
            log.warning("the compile server ended with status %d: the worker goes on alone", status)
        return [Compiled(**json.loads(line)) for line in output.splitlines()]

    def close(self) -> None:
        """Ends the server at once; what it is compiling ends by itself."""
        self._process.kill()
        self._process.wait()


def early_pool(config: WorkerConfig) -> CompilePool | None:
    """A pool for a worker that will very likely need one: only torch knows, and it takes long."""
    if config.device == "cpu" or config.ops == "torch" or not NVIDIA_DRIVER.exists():
        return None
    return None if KernelRecord(config).exists() else CompilePool()
