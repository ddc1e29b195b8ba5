"""Moving small integer arrays from the host to the device without waiting for it."""

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array


def upload(device: torch.device, *arrays: Int32Array) -> tuple[Tensor, ...]:
    """Each array `[n]` int32 as a tensor on the device; on a GPU in one asynchronous copy.

    On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array) for array in arrays)
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return tuple(packed.split([len(array) for array in arrays]))
