"""KV blocks in the host's memory, which keep the KV of blocks evicted from the device."""

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
    """Host blocks, each with the keys and values of all layers in contiguous memory.

    For a GPU the memory is pinned: kernels read and write it directly.
    """

    def __init__(self, cache: KVCache, num_blocks: int, ops: Ops) -> None:
        """Allocates the memory; SetupError if that fails."""
        self._device = cache.storage.device
        self._copy_blocks = ops.copy_blocks
        self._blocks = cache.storage.flatten(2)  # [2 * layers, blocks, values]
        parts, _, values = self._blocks.shape
        size = num_blocks * parts * values * cache.storage.itemsize
        memory = _pages(size)
        if self._device.type == "cuda":
            _pin(memory)
            # Unpinned before the pages are freed: else the driver would treat the next memory at
            # this address as pinned.
            weakref.finalize(self, _unpin, memory.data_ptr()).atexit = False
        storage = memory.view(cache.storage.dtype).view(num_blocks, parts, values)
        self._host_blocks = storage.transpose(0, 1)  # [2 * layers, host blocks, values]

    def copy(self, copies: StepHostCopies) -> None:
        """Queues the saves, then the loads, on the current stream."""
        saved, saved_host, loaded_host, loaded = upload(
            self._device, copies.saved, copies.saved_host, copies.loaded_host, copies.loaded
        )
        self._copy_blocks(self._blocks, saved, self._host_blocks, saved_host)
        self._copy_blocks(self._host_blocks, loaded_host, self._blocks, loaded)


def _pages(size: int) -> Tensor:
    """`[size]` bytes of zeroed host memory, aligned to a page."""
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8))
    except OSError as error:
        raise SetupError(
            f"cannot allocate {size / 1e9:.1f} GB of host memory for KV blocks ({error}); lower "
            "--host-memory-gb"
        ) from error


def _pin(memory: Tensor) -> None:
    """Pins memory for the GPU.

    Torch rounds its own pinned allocations to powers of two, which can waste half of the memory.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise SetupError(
            f"{memory.nbytes / 1e9:.1f} GB of the host's memory cannot be pinned (CUDA error "
            f"{status}); lower --host-memory-gb or raise the limit of locked memory"
        )


def _unpin(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
