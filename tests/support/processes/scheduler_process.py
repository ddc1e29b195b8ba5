"""A real scheduler process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.cli.launch.ports import free_port


@contextmanager
def scheduler_process(workers: list[str], *flags: str) -> Iterator[str]:
    """Starts a scheduler with these workers and kills it at the end of the block.

    Yields its address at once: it may not listen yet.
    """
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "pagewire.cli.main", "scheduler", *flags]
    command += [f"--grpc-port={address.rpartition(':')[2]}", f"--workers={','.join(workers)}"]
    process = subprocess.Popen(command)
    try:
        yield address
    finally:
        process.kill()
        process.wait()
