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
        self._ready = memory.ready.ctypes.data
        self.masks = torch.full_like(self._host, -1, device=device)  # [slots, words]
        self._stream = torch.cuda.Stream(device)
        self._used = torch.cuda.Event()  # behind the last use of `masks`

    def hold(self, step: StepMasks) -> None:
        """Makes the current stream wait until the masks of `step` are in `masks`.

        Other rows of `masks` are as the host has them, whole or not.
        """
        if step.compiles():
            self._thread.post(step.wait)  # which gives up rows that hold up the others for long
        self._stream.wait_event(self._used)
        order = np.argsort(step.slots)
        slots, stamps = step.slots[order], step.stamps[order]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for begin in range(0, len(slots), ROWS):
                part = slice(begin, begin + ROWS)
                self._await(slots[part], stamps[part])
                first, end = int(slots[part][0]), int(slots[part][-1]) + 1
                self.masks[first:end].copy_(self._host[first:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)

    def release(self) -> None:
        """What is queued from now on reads no more of `masks`."""
        self._used.record()

    def _await(self, slots: Int32Array, stamps: NDArray[np.int64]) -> None:
        """Queues waiting for the stamps `[n]` of `slots [n]`."""
        waits = np.zeros(len(slots), _WAIT)
        waits["operation"], waits["flags"] = _WAIT_VALUE_64, _AT_LEAST
        waits["address"] = self._ready + 8 * slots.astype(np.uint64)
        waits["value"] = stamps
        status = _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(self._stream.cuda_stream),
            ctypes.c_uint(len(waits)),
            ctypes.c_void_p(waits.ctypes.data),
            ctypes.c_uint(0),
        )
        if status != 0:
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUresult {status}")

    @cached_property
    def _thread(self) -> QueueThread:
        return QueueThread("gate", end_process)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
