"""Copies small integer arrays from the host to the device without waiting."""

import torch
from torch import Tensor

from pagewire.packing import Int32Array

# In values of 4 bytes. Triton compiles another kernel variant for pointers not aligned to 16 bytes.
ALIGNMENT = 4


def upload(device: torch.device, *arrays: Int32Array) -> tuple[Tensor, ...]:
    """Each array `[n]` int32 as a tensor on the device.

    On a GPU all travel in one asynchronous copy. On a CPU the tensors share memory with the arrays.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array) for array in arrays)
    padded = [len(array) + -len(array) % ALIGNMENT for array in arrays]
    packed = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=True)
    at = 0
    for array, size in zip(arrays, padded, strict=True):
        packed[at : at + len(array)] = torch.from_numpy(array)
        at += size
    pieces = packed.to(device, non_blocking=True).split(padded)
    return tuple(piece[: len(array)] for piece, array in zip(pieces, arrays, strict=True))
