"""The paged KV cache of a worker, and how many blocks it gets."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig

# Blocks on their way through memory outside the cache, which may leave little: some MiB a block.
COPIED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values by layer, each `[num_blocks, kv_heads, block_size, head_dim]`.

    All are views of `storage [2 * layers, num_blocks, kv_heads, block_size, head_dim]`, so that a
    block is copied in all layers at once. Block 0 is scratch. Every value is finite: see
    `attention.py` of the reference ops for why.
    """

    storage: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.storage.nbytes)

    def scrub(self, blocks: Tensor) -> None:
        """Replaces what is not finite in `blocks [n]` (integers on the device) by finite values."""
        for tensor in (*self.keys, *self.values):
            tensor[blocks] = torch.nan_to_num(tensor[blocks])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks `sources [n]` to `targets [n]`; no block is among both.

        What follows the tokens that are wanted of a block may be those of a sequence that failed.
        """
        for begin in range(0, len(sources), COPIED_AT_ONCE):
            end = begin + COPIED_AT_ONCE
            values = torch.nan_to_num(self.storage[:, sources[begin:end]])
            self.storage[:, targets[begin:end]] = values


def empty_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache of zeros."""
    layers = model.num_layers
    shape = (2 * layers, num_blocks, model.num_kv_heads, block_size, model.head_dim)
    storage = zeros(shape, dtype, device)
    tensors = storage.unbind()
    return KVCache(storage, tensors[:layers], tensors[layers:])


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    values = 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim
    return int(values * dtype.itemsize)


def blocks_in(available: int, size: int, name: str) -> int:
    """How many blocks of `size` bytes `available` bytes hold; SetupError if fewer than two."""
    count = available // size
    if count < 2:
        raise SetupError(
            f"{available / 2**20:.1f} MiB are free for the KV cache, two blocks of "
            f"{size / 2**20:.2f} MiB are the least; raise {name} or take a smaller model"
        )
    return count


def host_blocks_in(gigabytes: float, size: int) -> int:
    """How many blocks of `size` bytes `--host-memory-gb` holds; SetupError if it is none of some
    memory."""
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
    """Bytes of a GPU that the KV cache may take: its share less weights, the state of the slots
    and peak activations.

    `profile` runs the largest forward pass, with the weights in place and no cache yet.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    # What other processes and the driver hold is neither in torch's pool nor free.
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return int(total * utilization - others - peak)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of which much may never be written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeroed pages from the system, which cost memory once they are written only.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
