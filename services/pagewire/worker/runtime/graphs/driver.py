"""Copies on the stream of steps, queued by direct calls of the driver.

A copy by torch looks up streams, records events for its allocator and releases the interpreter
lock. Getting the lock back may take as long as another thread's turn. These calls take a few
microseconds and keep the lock.
"""

from __future__ import annotations

import ctypes
from functools import cache

from pagewire.worker.ops.device import step_stream


def copy_to_device(to: int, source: int, size: int) -> None:
    """Queues a copy of `size` bytes from pinned memory at the address `source`."""
    driver, stream = _driver()
    _check(driver.cuMemcpyHtoDAsync_v2(to, source, size, stream))


def copy_to_host(to: int, source: int, size: int) -> None:
    """Queues a copy of `size` bytes to pinned memory at the address `to`."""
    driver, stream = _driver()
    _check(driver.cuMemcpyDtoHAsync_v2(to, source, size, stream))


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error: the driver cannot queue a copy: CUresult {status}")


@cache
def _driver() -> tuple[ctypes.PyDLL, int]:
    """The driver, and the stream of steps."""
    driver = ctypes.PyDLL("libcuda.so.1")
    for copy in (driver.cuMemcpyHtoDAsync_v2, driver.cuMemcpyDtoHAsync_v2):
        copy.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return driver, step_stream().cuda_stream
