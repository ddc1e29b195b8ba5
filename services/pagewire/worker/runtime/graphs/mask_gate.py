"""Lets the device wait for masks, so that the host need not: steps behind them are launched ahead.

In a stream of its own the device waits, by the driver's stream memory operations, until the stamps
in the host's memory are those of the step's tokens, see `MaskMemory`; then it copies the masks. No
thread of the worker takes part, so the interpreter's lock delays no mask.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.lifecycle.process import end_process
from pagewire.packing import Int32Array
from pagewire.worker.ops.device import step_stream
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.runtime.upload import pin, unpin

# CUstreamBatchMemOpParams of a CU_STREAM_MEM_OP_WAIT_VALUE_64; the flag is for "at least".
_WAIT = np.dtype(
    {
        "names": ["operation", "address", "value", "flags"],
        "formats": ["<i4", "<u8", "<i8", "<u4"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 48,
    }
)
_WAIT_VALUE_64, _AT_LEAST = 4, 0

# Rows that are waited for and then copied while others are waited for. The driver takes at most
# 255 operations at once.
ROWS = 64


class MaskGate:
    """The masks of all slots on the device, and the stream that fetches them."""

    def __init__(self, memory: MaskMemory, device: torch.device) -> None:
        """Pins `memory`."""
        pages = torch.from_numpy(memory.bytes)
        pin(pages, "masks of structured output", "--num-slots")
        weakref.finalize(self, unpin, pages.data_ptr()).atexit = False  # before it is freed
        self._host = torch.from_numpy(memory.masks)
        self.masks = torch.full_like(self._host, -1, device=device)  # [slots, words]
        self._addresses = self.masks.data_ptr(), self._host.data_ptr()
        self._row_bytes = self._host[0].nbytes
        self._ready = memory.ready.ctypes.data
        self._waits = np.zeros(ROWS, _WAIT)  # the driver reads it before it returns
        self._waits["operation"], self._waits["flags"] = _WAIT_VALUE_64, _AT_LEAST
        self._stream = torch.cuda.Stream(device)
        self._used = torch.cuda.Event()  # behind the last use of `masks`

    def hold(self, step: StepMasks) -> None:
        """Makes the stream of steps wait until the masks of `step` are in `masks`.

        Other rows of `masks` are as the host has them, whole or not.
        """
        if step.compiles():
            self._thread.post(step.wait)  # which gives up rows that hold up the others for long
        self._stream.wait_event(self._used)
        order = np.argsort(step.slots)
        slots, stamps = step.slots[order], step.stamps[order]
        for begin in range(0, len(slots), ROWS):
            part = slice(begin, begin + ROWS)
            self._await(slots[part], stamps[part])
            self._copy(int(slots[part][0]), int(slots[part][-1]) + 1)
        step_stream().wait_stream(self._stream)

    def release(self) -> None:
        """What is queued from now on reads no more of `masks`."""
        self._used.record(step_stream())

    def _await(self, slots: Int32Array, stamps: NDArray[np.int64]) -> None:
        """Queues waiting for the stamps `[n]` of `slots [n]`."""
        waits = self._waits[: len(slots)]
        waits["address"] = self._ready + 8 * slots.astype(np.uint64)
        waits["value"] = stamps
        stream, address = self._stream.cuda_stream, waits.ctypes.data
        _check(_driver().cuStreamBatchMemOp_v2(stream, len(waits), address, 0))

    def _copy(self, begin: int, end: int) -> None:
        """Queues the copy of the masks of the slots from `begin` to `end`.

        By the driver, as the waiting: a copy of tensors needs views of them and a current stream.
        """
        to, source = (address + begin * self._row_bytes for address in self._addresses)
        size = (end - begin) * self._row_bytes
        _check(_driver().cuMemcpyHtoDAsync_v2(to, source, size, self._stream.cuda_stream))

    @cached_property
    def _thread(self) -> QueueThread:
        return QueueThread("gate", end_process)


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the driver cannot queue masks: CUresult {status}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, unsigned, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
    driver.cuStreamBatchMemOp_v2.argtypes = [pointer, unsigned, pointer, unsigned]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [size, pointer, size, pointer]
    return driver
