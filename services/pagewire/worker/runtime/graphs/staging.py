"""Inputs of steps on the host, and pinned memory for their copies to the device and back."""

from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.ops.contract.step import WRITE_BLOCKS, WRITE_COLUMNS, WRITE_SLOTS
from pagewire.worker.ops.device import step_stream
from pagewire.worker.protocol.steps.device_plan import TableWrites
from pagewire.worker.runtime.graphs.driver import copy_to_device, copy_to_host

# Copies to the device that may be in flight; the next one waits. Few steps are in flight, and a
# step makes one, or more if many blocks are assigned at once.
STAGING_BUFFERS = 16


class Staging:
    """A ring of buffers of `size` int32 values each."""

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)
        ]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]
        self._next = 0

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        """Queues a copy of `fill` to `target`, of the same size, on the stream of steps."""
        assert target.is_contiguous()
        assert target.numel() == fill.size
        turn = self._next
        self._next = (turn + 1) % STAGING_BUFFERS
        copied = self._copied[turn]
        if not copied.query():  # unlike waiting, this keeps the interpreter lock
            copied.synchronize()
        self._arrays[turn][: fill.size] = fill.ravel()
        copy_to_device(target.data_ptr(), self._addresses[turn], fill.nbytes)
        copied.record(step_stream())


class ResultBuffers:
    """Pinned memory for the results of steps in flight, reused once they are read."""

    def __init__(self, size: int) -> None:
        """Results have up to `size` values."""
        self._size = size
        self._free: deque[Tensor] = deque()

    def copy(self, results: Tensor) -> Callable[[], Int32Array]:
        """Queues a copy of `results` int32 to the host; returns a function that reads the copy.

        Call it on any thread, once the copy is done.
        """
        assert results.is_contiguous()
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = torch.empty(self._size, dtype=torch.int32, pin_memory=True)
        if results.numel():
            copy_to_host(buffer.data_ptr(), results.data_ptr(), results.nbytes)
        return partial(self._read, buffer, tuple(results.shape))

    def _read(self, buffer: Tensor, shape: tuple[int, ...]) -> Int32Array:
        values: Int32Array = buffer.numpy()[: prod(shape)].reshape(shape).copy()
        self._free.append(buffer)
        return values


def pack_writes(packed: Int32Array, writes: TableWrites | None, padding_slot: int) -> None:
    """Fills the inputs of `packed [inputs, rows]` for at most `rows` writes to block tables."""
    packed[WRITE_SLOTS] = padding_slot
    if writes is not None:
        count = len(writes.slots)
        packed[WRITE_SLOTS, :count] = writes.slots
        packed[WRITE_COLUMNS, :count] = writes.columns
        packed[WRITE_BLOCKS, :count] = writes.blocks
