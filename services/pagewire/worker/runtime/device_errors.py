"""What an error of torch says about the device."""

import torch


def is_fatal(error: BaseException) -> bool:
    """Whether an error means that the device cannot be used by this process any more."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
