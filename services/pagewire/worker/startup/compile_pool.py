"""Compiles kernels in other processes while the worker that will launch them starts.

Triton holds the interpreter lock for most of a compilation, so threads would not run in parallel.
This module needs neither torch nor triton: the pool starts before the worker imports them.
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
# Far more than all variants take. After this time the worker compiles the missing variants itself.
TIMEOUT = 120.0
# The jobs of a worker take some 100 KiB, so `submit` does not wait while the pool imports.
PIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A kernel variant to compile."""

    target: tuple[str, int, int]  # backend, architecture and warp size, as in a GPUTarget
    module: str
    kernel: str
    specialization: str  # the argument of JITFunction.preload


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of a job: its seconds, and its error if it failed."""

    kernel: str
    seconds: float
    error: str | None


class CompilePool:
    """Fills Triton's cache with kernel variants. Best effort: a worker can start without it."""

    def __init__(self) -> None:
        """Starts `compile_server`, which does its imports in parallel with this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pagewire.worker.startup.compile_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
        )
        self._broken = False

    def submit(self, job: CompileJob) -> None:
        """Queues a variant to be compiled; does not wait."""
        if self._broken:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._broken = True

    def finish(self) -> list[CompileResult]:
        """Waits until all jobs are done, and ends the processes. Empty after a timeout."""
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            log.warning(
                "kernels were not compiled within %g s: the worker compiles them itself", TIMEOUT
            )
            self.close()
            return []
        status = self._process.returncode
        if self._broken or status:
            log.warning(
                "the compile server ended with status %d: the worker compiles what is missing",
                status,
            )
        return [CompileResult(**json.loads(line)) for line in output.splitlines()]

    def close(self) -> None:
        """Kills the server. Compilations that it has forked run to their end."""
        self._process.kill()
        self._process.wait()


def start_compile_pool(config: WorkerConfig) -> CompilePool | None:
    """Starts a pool if the worker probably runs Triton kernels that are not compiled yet.

    It is a guess because it does not import torch, which takes seconds.
    """
    if config.device == "cpu" or config.ops == "torch" or not NVIDIA_DRIVER.exists():
        return None
    return None if KernelRecord(config).exists() else CompilePool()
