"""Memory of the host that the GPU reads and writes directly."""

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError


def pin(memory: Tensor) -> None:
    """Pins memory that begins at a page; SetupError if the driver refuses it.

    Torch rounds its own pinned allocations to powers of two, which can waste half of the memory.
    `unpin` it before it is freed: else the driver takes the next memory at its address for pinned.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise SetupError(
            f"{memory.nbytes / 1e9:.3g} GB of the host's memory cannot be pinned (CUDA error "
            f"{status}); lower --host-memory-gb or raise the limit of locked memory"
        )


def unpin(pointer: int) -> None:
    """Ends what `pin` did."""
    torch.cuda.cudart().cudaHostUnregister(pointer)
