"""Simulated workers in one process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.waiting import until


@dataclass(frozen=True)
class SimulatedWorkers:
    """The process, the addresses of its workers, and its log file."""

    process: subprocess.Popen[bytes]
    addresses: list[str]
    log: Path


@contextmanager
def simulated_workers(folder: Path, count: int = 1, *flags: str) -> Iterator[SimulatedWorkers]:
    """Starts `count` workers in one process, waits until they are ready, and kills it at the end.

    Steps take no time unless the flags set another speedup.
    """
    log = folder / "simulated.log"
    base = f"unix:{folder}/worker"
    command = [sys.executable, "-m", "pagewire.cli.main", "simulated-worker"]
    command += [f"--worker-address={base}", f"--count={count}", "--speedup=0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        until(lambda: process.poll() is not None or "ready on" in log.read_text(), 30)
        assert process.poll() is None, log.read_text()
        addresses = [base] if count == 1 else [f"{base}.{index}" for index in range(count)]
        yield SimulatedWorkers(process, addresses, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
