"""The process of a `CompilePool`: compiles kernel variants for a device that it never touches.

It reads one `CompileJob` a line from standard input until its end, and writes one `CompileResult`
a line. It compiles each job in a fork of itself: it has imported all modules, compiled nothing and
started no thread. The output of a job is its files in Triton's cache.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from pagewire.worker.startup.compile_pool import CompileJob, CompileResult

# A compilation takes some 200 MB.
MAX_PROCESSES = 16


class TargetDriver:
    """The part of a Triton driver that compilation uses: the target, without a device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Forks:
    """Runs calls in forks of this process, `max_running` at a time."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._running = 0

    def run(self, call: Callable[[], object]) -> None:
        """Runs `call` in a fork; waits first while `max_running` are running."""
        if self._running == self._max_running:
            self._reap()
        if os.fork() == 0:
            try:
                call()
            finally:
                os._exit(0)
        self._running += 1

    def join(self) -> None:
        """Waits for all forks."""
        while self._running:
            self._reap()

    def _reap(self) -> None:
        os.wait()
        self._running -= 1


def main() -> None:
    """Serves the jobs of one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when the worker closes the pipe
    forks = Forks(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
    forks.run(_build_launch_module)
    # Work that every fork would repeat otherwise.
    import_module("pagewire.worker.ops").load_ops("triton")
    triton_key()
    signatures = set()
    for line in sys.stdin.buffer:
        job = CompileJob(**json.loads(line))
        make_backend(GPUTarget(*job.target)).hash()  # asks the assembler for its version, once
        signature = tuple(json.loads(job.specialization)["signature"].values())
        forks.run(partial(_report, job, signature not in signatures))
        signatures.add(signature)
    forks.join()


def _report(job: CompileJob, new_signature: bool) -> None:
    began, error = time.monotonic(), None
    try:
        compile_job(job, new_signature)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:500]
    compiled = CompileResult(job.kernel, round(time.monotonic() - began, 3), error)
    os.write(1, json.dumps(asdict(compiled)).encode() + b"\n")  # short enough for an atomic write


def compile_job(job: CompileJob, new_signature: bool) -> None:
    """Puts the files into Triton's cache that a launch of the variant will look up."""
    driver.set_active(TargetDriver(GPUTarget(*job.target)))
    kernel = getattr(import_module(job.module), job.kernel).preload(job.specialization)
    # Triton 3.6 compiles a launcher in C for each signature.
    if new_signature and hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _build_launch_module() -> None:
    """Builds the C module that Triton loads before its first launch.

    If this fails, the worker builds it.
    """
    try:
        nvidia.CudaUtils()
    except Exception:
        os._exit(1)


if __name__ == "__main__":
    main()
