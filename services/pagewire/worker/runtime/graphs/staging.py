"""Inputs of steps on the host, and pinned memory for their copies to the device."""

import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.ops.contract.step import WRITE_BLOCKS, WRITE_COLUMNS, WRITE_SLOTS
from pagewire.worker.ops.device import step_stream
from pagewire.worker.protocol.steps.device_plan import TableWrites

# Copies to the device that may be in flight. A step makes at most two, and few steps are in flight.
STAGING_BUFFERS = 16


class Staging:
    """A ring of buffers of `size` int32 values each."""

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]
        self._next = 0

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        """Queues a copy of `fill` to `target`, of as many elements, on the stream of steps."""
        turn = self._next
        self._next = (turn + 1) % STAGING_BUFFERS
        self._copied[turn].synchronize()
        buffer = self._buffers[turn][: fill.size]
        buffer.numpy()[:] = fill.ravel()
        target.view(-1).copy_(buffer, non_blocking=True)
        self._copied[turn].record(step_stream())


def pack_writes(packed: Int32Array, writes: TableWrites | None, padding_slot: int) -> None:
    """Fills the rows of `packed [inputs, rows]` for at most as many writes to block tables."""
    packed[WRITE_SLOTS] = padding_slot
    if writes is not None:
        count = len(writes.slots)
        packed[WRITE_SLOTS, :count] = writes.slots
        packed[WRITE_COLUMNS, :count] = writes.columns
        packed[WRITE_BLOCKS, :count] = writes.blocks
