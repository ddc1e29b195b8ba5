"""Lets the device wait for masks instead of the host, so that later steps are launched ahead.

A captured step with constrained rows has a branch beside its layers. There, one small kernel polls
the stamps in the host's memory until they reach those of the step's tokens, see `MaskMemory`.
Another kernel copies the masks. No thread of the worker takes part, so the interpreter lock delays
no mask, and the launch of such a step needs no additional call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from pagewire.lifecycle.process import end_process
from pagewire.packing import Int32Array
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.sampling import TokenMasks
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.runtime.timer import DeviceTimer
from pagewire.worker.runtime.upload import pin, unpin

# Rows of the inputs, each `[rows]` int32: the slot of each row, -1 for a row without a mask; the
# place of the step's wait; and stamps, as int64 `[rows]`.
MASK_ROWS, TURNS, STAMPS = range(3)
NUM_INPUTS = 4

# Rows of one wait. Their masks are copied before the wait for the next rows.
ROWS = 32

# Seconds until a thread looks for grammars that are still being compiled. Most are compiled by
# then, and the thread does not take the interpreter's lock while steps are launched.
PATIENCE = 0.01

# Places for the waits of steps. Fewer steps are in flight.
PLACES = 128


class Branch:
    """Work that runs beside the current stream; both can be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work queued inside runs after earlier work, beside later work until `join`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.after():
            yield

    def after(self) -> AbstractContextManager[None]:
        """Work queued inside runs after that of the branch so far."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Later work of the current stream waits for that of the branch so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class MaskGate:
    """The masks of all slots on the device, and the branch of captured steps that fetches them."""

    def __init__(self, ops: Ops, memory: MaskMemory, device: torch.device) -> None:
        """Pins `memory`."""
        self._ops = ops
        self._pin(memory)
        self._host = torch.from_numpy(memory.padded_masks)  # [slots, words]
        self._ready = torch.from_numpy(memory.ready)  # [slots]
        self._masks = torch.full_like(self._host, -1, device=device)  # [slots, words]
        # Of each step, when its layers ended, and when it had its masks: nanoseconds [2, places].
        times = torch.zeros(2, PLACES, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._computed, self._fetched = times
        self._computed_ns, self._fetched_ns = times.numpy()
        self._turn = 0
        self._fetching, self._clocks = Branch(device), Branch(device)

    def begin(self, inputs: Tensor) -> None:
        """Fetches masks parallel to the next captured work until `masks`.

        `inputs` is `[NUM_INPUTS, rows]`.
        """
        rows, stamps = inputs[MASK_ROWS], inputs[STAMPS:].view(-1).view(torch.int64)
        with self._fetching.beside():
            for some, wanted in zip(rows.split(ROWS), stamps.split(ROWS), strict=True):
                self._ops.await_masks(self._ready, some, wanted)
                self._ops.fetch_masks(self._host, some, self._masks)

    @contextmanager
    def masks(self, inputs: Tensor) -> Iterator[TokenMasks]:
        """Waits for the masks, which captured work inside may read.

        The times of the wait are noted beside this work, which does not wait for that.
        """
        with self._clocks.beside():
            self._ops.note_time(self._computed, inputs[TURNS])
        self._fetching.join()
        with self._fetching.after():
            self._ops.note_time(self._fetched, inputs[TURNS])
        yield TokenMasks(inputs[MASK_ROWS], self._masks)
        self._clocks.join()
        self._fetching.join()

    def pack(self, packed: Int32Array, step: StepMasks, timer: DeviceTimer) -> None:
        """Fills `packed [NUM_INPUTS, rows]` for a step that is launched next.

        `timer` does not count the time that the device waits for masks: the scheduler has more
        steps in flight if steps are short.
        """
        if step.compiles():
            self._thread.post(partial(self._give_up_late, step, time.monotonic() + PATIENCE))
        packed[MASK_ROWS] = -1
        packed[MASK_ROWS, step.rows] = step.slots
        packed[STAMPS:].reshape(-1).view(np.int64)[step.rows] = step.stamps
        turn = self._turn
        self._turn = (turn + 1) % PLACES
        packed[TURNS, 0] = turn
        timer.leave_out(partial(self._waited, turn))

    def _give_up_late(self, step: StepMasks, begin: float) -> None:
        """Gives up rows that delay the others too long."""
        time.sleep(max(begin - time.monotonic(), 0))
        step.wait()

    def _waited(self, turn: int) -> float:
        return max(float(self._fetched_ns[turn] - self._computed_ns[turn]) / 1e9, 0.0)

    def _pin(self, memory: MaskMemory) -> None:
        pages = torch.from_numpy(memory.bytes)
        pin(pages, "masks of structured output", "--num-slots")
        weakref.finalize(self, unpin, pages.data_ptr()).atexit = False  # before it is freed

    @cached_property
    def _thread(self) -> QueueThread:
        return QueueThread("gate", end_process)
