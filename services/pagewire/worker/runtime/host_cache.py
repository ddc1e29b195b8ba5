"""KV blocks in the host's memory, where they outlast their eviction from the device."""

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime.upload import upload


class HostCache:
    """As many blocks as were asked for, each with the keys and values of all layers side by side.

    The memory is pinned for a GPU, so that its kernels read and write it where it is.
    """

    def __init__(self, cache: KVCache, num_blocks: int, ops: Ops) -> None:
        """Takes the memory; SetupError if that cannot be had."""
        self._device = cache.storage.device
        self._copy_blocks = ops.copy_blocks
        self._blocks = cache.storage.flatten(2)  # [2 * layers, blocks, values]
        parts, _, values = self._blocks.shape
        size = num_blocks * parts * values * cache.storage.itemsize
        memory = _pages(size)
        if self._device.type == "cuda":
            _pin(memory)
            # Before the pages go: the driver would take what comes next to their place for pinned.
            weakref.finalize(self, _unpin, memory.data_ptr()).atexit = False
        storage = memory.view(cache.storage.dtype).view(num_blocks, parts, values)
        self._host_blocks = storage.transpose(0, 1)  # [2 * layers, host blocks, values]

    def copy(self, copies: StepHostCopies) -> None:
        """Saves, then loads, on the current stream."""
        saved, saved_host, loaded_host, loaded = upload(
            self._device, copies.saved, copies.saved_host, copies.loaded_host, copies.loaded
        )
        self._copy_blocks(self._blocks, saved, self._host_blocks, saved_host)
        self._copy_blocks(self._host_blocks, loaded_host, self._blocks, loaded)


def _pages(size: int) -> Tensor:
    """`[size]` bytes of the host, zeros, at the beginning of a page."""
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8))
    except OSError as error:
        raise SetupError(
            f"the host cannot give {size / 1e9:.1f} GB for KV blocks ({error}); lower "
            "--host-memory-gb"
        ) from error


def _pin(memory: Tensor) -> None:
    """Lets the GPU read and write memory where it is.

    Torch's own pinned memory comes in powers of two, which would waste up to half of it.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise SetupError(
            f"{memory.nbytes / 1e9:.1f} GB of the host's memory cannot be pinned (CUDA error "
            f"{status}); lower --host-memory-gb or raise the limit of locked memory"
        )


def _unpin(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
