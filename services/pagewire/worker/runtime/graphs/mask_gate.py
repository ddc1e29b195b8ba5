"""Lets the device wait for masks, so that the host need not: steps behind them are launched ahead.

A kernel in front of the sampling looks in the host's memory until the stamps of its rows are those
of their tokens, see `MaskMemory`, and copies the masks. No thread of the worker takes part, so the
interpreter's lock delays no mask.
"""

import weakref
from functools import cached_property

import torch
from torch import Tensor

from pagewire.lifecycle.process import end_process
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.runtime.pinned import pin, unpin


class MaskGate:
    """The masks of all slots on the device, and what it waits for."""

    def __init__(self, memory: MaskMemory, device: torch.device) -> None:
        """Pins `memory`."""
        pages = torch.from_numpy(memory.bytes)
        pin(pages)
        weakref.finalize(self, unpin, pages.data_ptr()).atexit = False  # before it is freed
        self._host = torch.from_numpy(memory.masks)
        self._ready, self._given_up = map(torch.from_numpy, (memory.ready, memory.given_up))
        # [slots, words], with the strides of the host's.
        self.masks = torch.empty_strided(
            self._host.shape, self._host.stride(), dtype=torch.int32, device=device
        )

    def hold(self, step: StepMasks) -> None:
        """Before the step's sampling is queued: gives up rows that hold up the others for long."""
        if step.compiles():
            self._thread.post(step.wait)

    def fetch(self, ops: Ops, slots: Tensor, generations: Tensor, indices: Tensor) -> None:
        """Queues the copies of masks to `masks`, each as soon as it is ready.

        `slots`, `generations` and `indices [rows]` as in `SamplingOps.fetch_masks`.
        """
        ops.fetch_masks(
            self.masks, self._host, self._ready, self._given_up, slots, generations, indices
        )

    @cached_property
    def _thread(self) -> QueueThread:
        return QueueThread("gate", end_process)
