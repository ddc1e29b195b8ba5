"""KV blocks in the host's memory, which keep the KV of blocks evicted from the device."""

import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime.upload import pin, unpin, upload


class HostCache:
    """Host blocks, each with the keys and values of all layers in contiguous memory.

    The scales of an FP8 cache and the KV of a draft model lie in memory of their own, in the same
    way. For a GPU the memory is pinned: kernels read and write it directly.
    """

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, ops: Ops) -> None:
        """Allocates the memory; SetupError if that fails. A block has its part of each cache."""
        self._device = caches[0].storage.device
        self._copy_blocks = ops.copy_blocks
        # Pairs of [2 * layers, blocks, values] on the device and the same of the host's blocks.
        self._pairs = [
            (blocks, self._allocated(blocks, num_blocks))
            for cache in caches
            for blocks in (storage.flatten(2) for storage in cache.storages)
        ]

    def copy(self, copies: StepHostCopies) -> None:
        """Queues the saves, then the loads, on the current stream."""
        saved, saved_host, loaded_host, loaded = upload(
            self._device, copies.saved, copies.saved_host, copies.loaded_host, copies.loaded
        )
        for blocks, host_blocks in self._pairs:
            self._copy_blocks(blocks, saved, host_blocks, saved_host)
            self._copy_blocks(host_blocks, loaded_host, blocks, loaded)

    def _allocated(self, blocks: Tensor, num_blocks: int) -> Tensor:
        """Host memory `[2 * layers, num_blocks, values]` for `blocks [2 * layers, _, values]`."""
        parts, _, values = blocks.shape
        memory = _pages(num_blocks * parts * values * blocks.itemsize)
        if self._device.type == "cuda":
            pin(memory, "KV", "--host-memory-gb")
            weakref.finalize(self, unpin, memory.data_ptr()).atexit = False
        return memory.view(blocks.dtype).view(num_blocks, parts, values).transpose(0, 1)


def _pages(size: int) -> Tensor:
    """`[size]` bytes of zeroed host memory, aligned to a page."""
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8))
    except OSError as error:
        raise SetupError(
            f"cannot allocate {size / 1e9:.1f} GB of host memory for KV blocks ({error}); lower "
            "--host-memory-gb"
        ) from error
