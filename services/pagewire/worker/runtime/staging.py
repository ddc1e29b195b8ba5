"""Pinned host memory for the inputs of captured steps on their way to the device."""

import torch
from torch import Tensor

from pagewire.packing import Int32Array

# Copies to the device that may be under way; a step makes two at most, and run-ahead is far below.
STAGING_BUFFERS = 16


class Staging:
    """Buffers of `size` int32 values, used in turn."""

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]
        self._next = 0

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        """Copies `fill` to `target` (same number of elements) on the current stream."""
        turn = self._next
        self._next = (turn + 1) % STAGING_BUFFERS
        self._copied[turn].synchronize()
        buffer = self._buffers[turn][: fill.size]
        buffer.numpy()[:] = fill.ravel()
        target.view(-1).copy_(buffer, non_blocking=True)
        self._copied[turn].record()
