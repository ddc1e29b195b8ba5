"""Lets the device wait for masks, so that the host need not: steps behind them are launched ahead.

The device counts the steps whose masks it has got. A step that needs masks waits in its stream for
that count, by the driver's stream memory operations; a thread copies the masks in another stream as
soon as they are known, and raises the count behind the copy.
"""

from __future__ import annotations

import ctypes
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from pagewire.lifecycle.process import end_process
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.queue_thread import QueueThread

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, by the sign of the 32-bit difference


class MaskGate:
    """The masks of all slots on the device, and the streams that wait for them."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        """`host [slots, words]` int32 is where masks are written, in pinned memory."""
        self.masks = torch.full_like(host, -1, device=device)  # [slots, words]
        self._host = host
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._copies = torch.cuda.Stream(device)
        self._steps = 0

    def hold(self, step: StepMasks) -> None:
        """Makes the current stream wait until the masks of `step` are in `masks`.

        Other rows of `masks` are as the host has them, whole or not.
        """
        self._steps = (self._steps + 1) & 0xFFFFFFFF
        # First, so that the stream cannot be left waiting.
        self._thread.post(partial(self._open, step, self._steps))
        self._call("cuStreamWaitValue32_v2", torch.cuda.current_stream(), self._steps)

    def _open(self, step: StepMasks, number: int) -> None:
        step.wait()
        first, end = int(step.slots.min()), int(step.slots.max()) + 1
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self.masks[first:end].copy_(self._host[first:end], non_blocking=True)
        self._call("cuStreamWriteValue32_v2", self._copies, number)

    def _call(self, function: str, stream: torch.cuda.Stream, value: int) -> None:
        """A stream memory operation on the count; RuntimeError if the driver refuses it."""
        arguments = ctypes.c_uint64(self._count.data_ptr()), ctypes.c_uint32(value), _AT_LEAST
        status = getattr(_driver(), function)(ctypes.c_void_p(stream.cuda_stream), *arguments)
        if status != 0:
            raise RuntimeError(f"{function} failed with CUresult {status}")

    @cached_property
    def _thread(self) -> QueueThread:
        return QueueThread("gate", end_process)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
