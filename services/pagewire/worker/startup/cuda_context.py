"""Opens the CUDA context of a GPU while torch is still being imported, as both take time."""

import ctypes
from threading import Thread

from pagewire.config import WorkerConfig

DRIVER = "libcuda.so.1"


def open_cuda_context(config: WorkerConfig) -> Thread | None:
    """Opens the context of the worker's GPU in a thread; None if the worker uses no GPU.

    Best effort: torch opens the device again and reports errors.
    """
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit():
        return None
    thread = Thread(target=_open, args=(int(index or 0),), name="context", daemon=True)
    thread.start()
    return thread


def _open(index: int) -> None:
    """Retains the primary context of a device until the process ends."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return  # no GPU here
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
