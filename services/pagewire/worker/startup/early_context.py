"""The context of a GPU, made while torch is still being imported: each takes its time."""

import ctypes
from threading import Thread

from pagewire.config import WorkerConfig

DRIVER = "libcuda.so.1"


def begin_context(config: WorkerConfig) -> Thread | None:
    """Has a thread open the worker's GPU, if it names one; torch finds it open.

    What goes wrong is found, and told, when torch opens it.
    """
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit():
        return None
    thread = Thread(target=_open, args=(int(index or 0),), name="context", daemon=True)
    thread.start()
    return thread


def _open(index: int) -> None:
    """Retains the primary context of a device for as long as the process lives."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return  # no GPU here
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
