"""Distinguishes errors that lose the device from errors of one step."""

import torch


def is_fatal(error: BaseException) -> bool:
    """Whether this process cannot use the device any more after `error`."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
