"""Which errors lose the device."""

import torch

from pagewire.worker.runtime.device_errors import is_fatal


def test_only_a_lost_device_is_fatal() -> None:
    assert is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_fatal(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_fatal(ValueError("shape"))
