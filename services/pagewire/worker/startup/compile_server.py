"""The process of a `CompilePool`: compiles kernel variants for a device that it never touches.

Reads a `Job` a line from standard input until its end, and writes a `Compiled` a line. Each job is
compiled in a fork of this process, which has imported everything, compiled nothing and started no
thread. What is left of a job is its files in Triton's cache.
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

from pagewire.worker.startup.compile_pool import Compiled, Job

# A compilation takes some 200 MB.
MAX_PROCESSES = 16


class TargetDriver:
    """As much of a Triton driver as compiling asks for: the target, and no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Forks:
    """Runs calls in forks of this process, `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0

    def run(self, call: Callable[[], object]) -> None:
        """Runs `call`, once there is room for it."""
        if self._running == self._most:
            self._reap()
        if os.fork() == 0:
            try:
                call()
            finally:
                os._exit(0)
        self._running += 1

    def join(self) -> None:
        """Waits for all."""
        while self._running:
            self._reap()

    def _reap(self) -> None:
        os.wait()
        self._running -= 1


def main() -> None:
    """Serves one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker that ends closes the pipe
    forks = Forks(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
    forks.run(_build_launch_module)
    # What every fork would otherwise do again.
    import_module("pagewire.worker.ops").load_ops("triton")
    triton_key()
    signatures = set()
    for line in sys.stdin.buffer:
        job = Job(**json.loads(line))
        make_backend(GPUTarget(*job.target)).hash()  # asks the assembler for its version, once
        signature = tuple(json.loads(job.specialization)["signature"].values())
        forks.run(partial(_report, job, signature not in signatures))
        signatures.add(signature)
    forks.join()


def _report(job: Job, new_signature: bool) -> None:
    began, error = time.monotonic(), None
    try:
        compile_job(job, new_signature)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:500]
    compiled = Compiled(job.kernel, round(time.monotonic() - began, 3), error)
    os.write(1, json.dumps(asdict(compiled)).encode() + b"\n")  # short enough to be written whole


def compile_job(job: Job, new_signature: bool) -> None:
    """Puts into Triton's cache what a launch of the variant on its target will look up."""
    driver.set_active(TargetDriver(GPUTarget(*job.target)))
    kernel = getattr(import_module(job.module), job.kernel).preload(job.specialization)
    # Triton 3.6 has a C compiler make a launcher for each signature.
    if new_signature and hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _build_launch_module() -> None:
    """The C module that Triton loads before its first launch; a worker can build it as well."""
    try:
        nvidia.CudaUtils()
    except Exception:
        os._exit(1)


if __name__ == "__main__":
    main()
