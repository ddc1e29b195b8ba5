"""Integers of four or eight bits, packed into wider ones for checkpoints and for kernels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.contract.quantized import RUN

# The order in which AWQ packs eight values into an int32, from its lowest bits to its highest.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(packed: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The values of int32 `[..., words]` from the lowest bits up: uint8 `[..., 32 / bits * words]`.

    With `order`, the bits of a word hold the values with these indices.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    if order is not None:
        shifts = shifts[torch.tensor(order, device=packed.device).argsort()]
    values = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    unpacked: Tensor = values.flatten(-2).to(torch.uint8)
    return unpacked


def pack(values: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack` without an order: int32 `[..., words]`; 0 fills the last word.

    `values [..., n]` are uint8.
    """
    count = 32 // bits
    words = F.pad(values, (0, -values.shape[-1] % count)).unflatten(-1, (-1, count)).long()
    shifts = torch.arange(0, 32, bits, device=values.device)
    # The sum of unsigned words needs 64 bits; the conversion keeps the lower 32.
    packed: Tensor = (words << shifts).sum(-1).to(torch.int32)
    return packed


def pack_runs(values: Tensor) -> Tensor:
    """Four-bit values `[rows, columns]` in the layout of `GroupedWeight`, uint8."""
    runs = F.pad(values, (0, -values.shape[1] % RUN)).unflatten(1, (-1, 2, RUN // 2))
    low, high = runs.unbind(2)
    packed: Tensor = (low | high << 4).flatten(1)
    return packed


def unpack_runs(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_runs`: uint8 `[rows, columns]`."""
    runs = packed.unflatten(1, (-1, RUN // 2))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)[:, :columns]
