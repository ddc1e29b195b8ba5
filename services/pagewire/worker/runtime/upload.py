"""Host memory for the device: copies small arrays without waiting, and pins pages."""

import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.errors import SetupError

# In values of 4 bytes. Triton compiles another kernel variant for pointers not aligned to 16 bytes.
ALIGNMENT = 4


def upload(device: torch.device, *arrays: Int32Array) -> tuple[Tensor, ...]:
    """Each array `[n]` int32 as a tensor on the device.

    For a GPU one asynchronous copy has all arrays. On a CPU the tensors use the arrays' memory.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array) for array in arrays)
    padded = [len(array) + -len(array) % ALIGNMENT for array in arrays]
    packed = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=True)
    at = 0
    for array, size in zip(arrays, padded, strict=True):
        packed[at : at + len(array)] = torch.from_numpy(array)
        at += size
    pieces = packed.to(device, non_blocking=True).split(padded)
    return tuple(piece[: len(array)] for piece, array in zip(pieces, arrays, strict=True))


def pin(memory: Tensor, content: str, flag: str) -> None:
    """Pins memory that begins at a page; SetupError if the driver refuses it.

    The error names the memory's content, and the flag that makes it smaller.
    Torch rounds its own pinned allocations to powers of two, which can waste half of the memory.
    `unpin` it before it is freed: else the driver treats the next memory at its address as pinned.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise SetupError(
            f"{memory.nbytes / 1e9:.3g} GB of the host's memory, for {content}, cannot be pinned "
            f"(CUDA error {status}); lower {flag} or raise the limit of locked memory"
        )


def unpin(pointer: int) -> None:
    """Reverts `pin`."""
    torch.cuda.cudart().cudaHostUnregister(pointer)
