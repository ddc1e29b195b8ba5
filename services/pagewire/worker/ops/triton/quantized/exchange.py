"""Memory in which programs exchange the sums of a tile that they share."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagewire.worker.ops.device import multiprocessors


@cache
def shared_sums(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the sums of parts, and for flags of programs.

    Flags are 0 between launches. Both are allocated before graphs are captured: a worker runs every
    step once before that.
    """
    programs = 4 * multiprocessors(device)
    return (
        torch.empty(programs * 128 * 128, dtype=torch.float32, device=device),
        torch.zeros(programs * 8, dtype=torch.int32, device=device),
    )
