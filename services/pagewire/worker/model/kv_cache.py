"""The paged KV cache on the device, and how many blocks fit into memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.ops.contract.blocks import KVScales

# Copies need temporary memory of some MiB a block, and the cache leaves little memory free.
MAX_BLOCKS_A_COPY = 16
# The bits of NaN in E4M3, without the sign.
_FP8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values by layer.

    Keys and values are views of `storage`, so that one operation copies a block in all layers.
    Block 0 is scratch. Every value is finite; `ops/contract/attention.py` says why.

    With latent attention a layer has one tensor instead of two, both `keys` and `values`:
    `[num_blocks, 1, block_size, rank + rotated_dim]`, a latent vector and a rotated key a token.
    """

    # [2 * layers, num_blocks, kv_heads, block_size, head_dim], keys first. FP8 is stored as uint8,
    # because torch does not index FP8 tensors on every device.
    storage: Tensor
    keys: tuple[Tensor, ...]  # by layer, each [num_blocks, kv_heads, block_size, head_dim]
    values: tuple[Tensor, ...]  # by layer, each [num_blocks, kv_heads, block_size, head_dim]
    # [2 * layers, num_blocks, kv_heads, block_size] float32, the scales of an FP8 cache.
    scale_storage: Tensor | None
    scales: tuple[KVScales | None, ...]  # by layer; None if not in FP8

    @property
    def storages(self) -> tuple[Tensor, ...]:
        """All tensors of blocks, each `[2 * layers, num_blocks, ...]`."""
        scales = self.scale_storage
        return (self.storage,) if scales is None else (self.storage, scales)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.nbytes for storage in self.storages)

    def scrub(self, blocks: Tensor) -> None:
        """Makes all values of `blocks [n]` (integers on the device) finite, as nan_to_num does.

        FP8 numbers that are NaN, and scales that are not finite, become 0.
        """
        for storage in self.storages:
            for part in storage:
                part[blocks] = _finite(part[blocks], storage is self.scale_storage)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks `sources [n]` to `targets [n]`. No block may be in both.

        Values become finite: after the needed tokens, a block may have values of a sequence that
        failed.
        """
        for begin in range(0, len(sources), MAX_BLOCKS_A_COPY):
            end = begin + MAX_BLOCKS_A_COPY
            for storage in self.storages:
                copied = storage[:, sources[begin:end]]
                storage[:, targets[begin:end]] = _finite(copied, storage is self.scale_storage)


def _finite(tensor: Tensor, scales: bool) -> Tensor:
    """`tensor` without NaN and infinity; a uint8 tensor has the bits of FP8 numbers."""
    if tensor.dtype == torch.uint8:
        return tensor.masked_fill((tensor & _FP8_NAN) == _FP8_NAN, 0)
    # The largest float32 as a scale would make FP8 numbers infinite.
    return tensor.nan_to_num(posinf=0.0, neginf=0.0) if scales else tensor.nan_to_num()


def empty_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache in which every value is 0; in `dtype`, unless the model's cache is in FP8."""
    layers, shape = model.num_layers, _storage_shape(model, num_blocks, block_size)
    if not model.fp8_kv:
        storage = lazy_zeros(shape, dtype, device)
        tensors = storage.unbind()
        return KVCache(storage, tensors[:layers], tensors[-layers:], None, (None,) * layers)
    storage = lazy_zeros(shape, torch.uint8, device)
    tensors = storage.view(torch.float8_e4m3fn).unbind()
    scale_storage = lazy_zeros(shape[:-1], torch.float32, device)
    parts = scale_storage.unbind()
    scales = tuple(KVScales(*pair) for pair in zip(parts[:layers], parts[layers:], strict=True))
    return KVCache(storage, tensors[:layers], tensors[layers:], scale_storage, scales)


def _storage_shape(model: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    if model.latent is not None:
        return model.num_layers, num_blocks, 1, block_size, model.latent.cached_dim
    return 2 * model.num_layers, num_blocks, model.num_kv_heads, block_size, model.served_head_dim


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: the KV of its tokens in all layers, with the scales if in FP8."""
    *vectors, size = _storage_shape(model, 1, block_size)
    if model.fp8_kv:
        return math.prod(vectors) * (size + torch.float32.itemsize)
    return math.prod(vectors) * size * dtype.itemsize


def blocks_in(available: int, size: int, name: str) -> int:
    """How many blocks of `size` bytes fit into `available` bytes; SetupError if fewer than two."""
    count = available // size
    if count < 2:
        raise SetupError(
            f"{available / 2**20:.1f} MiB are free for the KV cache, which needs two blocks of "
            f"{size / 2**20:.2f} MiB or more; raise {name} or use a smaller model"
        )
    return count


def host_blocks_in(gigabytes: float, size: int) -> int:
    """How many blocks of `size` bytes fit into `--host-memory-gb`.

    SetupError if the option is not 0 and no block fits.
    """
    count = int(gigabytes * 1e9) // size
    if gigabytes and not count:
        raise SetupError(
            f"--host-memory-gb {gigabytes:g} does not hold one block of {size / 1e9:.6f} GB; give "
            "more, or 0 for none"
        )
    return count


def measure_free_bytes(
    device: torch.device, utilization: float, profile: Callable[[], None]
) -> int:
    """Bytes of GPU memory that the KV cache may use.

    They are `utilization` (0 to 1) of the memory, less weights, slot state and peak activations.
    `profile` runs the largest step, with the weights loaded and no cache allocated yet.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    # Memory of other processes and of the driver is neither free nor in torch's pool.
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return int(total * utilization - others - peak)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that, on a CPU, costs memory only for the pages that are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates zeroed pages from the system, which assigns memory on the first write.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
