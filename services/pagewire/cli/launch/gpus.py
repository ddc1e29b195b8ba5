"""The NVIDIA GPUs that this process may use, found without importing torch."""

import os
from pathlib import Path

_DRIVER_LIST = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    if not _DRIVER_LIST.is_dir():
        return []
    return [str(index) for index in range(len(list(_DRIVER_LIST.iterdir())))]
