"""Weights in four bits in the order in which Hopper's tensor cores read them.

A thread of a warp holds, of each 16 columns of a weight row, the columns `2 q`, `2 q + 1`,
`2 q + 8` and `2 q + 9`, where `q` is its place among four neighbours. In an arranged weight the
32 columns that a thread holds of a run are 16 bytes, four words. A run of 64 rows is contiguous:
bytes are `[blocks of 64 rows, runs, rows, threads, words]`. Word `t` has eight columns:

| bits | 0 to 3 | 4 to 7 | 8 to 11 | 12 to 15 |
|---|---|---|---|---|
| column | 16 t + 2 q | 64 behind | 8 behind | 72 behind |

Bits 16 to 31 hold the column after each column of the table. So a shift and one logical instruction
make the 16-bit numbers of two neighbouring columns.

A pair has 32 bits: a scale, and above it the zero point plus `magic`. Kernels put a nibble into the
mantissa of `magic`, which adds the two, and subtract the upper half of the pair.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight

LINE = 8  # pairs of a line of `GroupedWeight.pairs`: 32 bytes
BLOCK = 64  # rows of a block, as many as a matrix instruction of Hopper has


def is_supported(weight: GroupedWeight) -> bool:
    """Tell whether this weight can be arranged."""
    return (
        weight.bits == 4
        and not weight.float4
        and weight.columns % RUN == 0
        and weight.group % RUN == 0
        and weight.scales.dtype in (torch.bfloat16, torch.float16)
    )


def arrange(weight: GroupedWeight) -> GroupedWeight:
    """Bring the bytes of each run into order, in place unless rows are padded, and pair scales with
    zero points."""
    assert weight.pairs is None
    values = weight.values
    if missing := -len(values) % BLOCK:
        values = F.pad(values, (0, 0, 0, missing))
    # [blocks, rows, runs, words, 8 columns, threads, next column]
    runs = values.view(-1, BLOCK, values.shape[1] // (RUN // 2), 4, 2, 4, 2)
    values.copy_(runs.permute(0, 2, 1, 5, 3, 6, 4).reshape(values.shape))
    return replace(weight, values=values, pairs=_pairs(weight))


def magic(dtype: torch.dtype) -> int:
    """Return the power of two to which a nibble in its mantissa is added.

    In bfloat16 the nibble is in the lowest bits of the mantissa, whose 7 bits count ones. In
    float16 it is in the bits from 4 on, and the 10 bits count sixteenths.
    """
    return 128 if dtype == torch.bfloat16 else 64


def _pairs(weight: GroupedWeight) -> Tensor:
    """The scales and zero points as `[blocks, groups, lines, LINE]` int32."""
    scales = weight.scales
    zeros = torch.full_like(scales, 8) if weight.zeros is None else weight.zeros
    middles = (zeros.float() + magic(scales.dtype)).to(scales.dtype)
    pairs = torch.stack((scales, middles), -1).view(torch.int32).squeeze(-1)
    padded = F.pad(pairs, (0, 0, 0, -len(pairs) % BLOCK)).view(-1, BLOCK, pairs.shape[1])
    return padded.transpose(1, 2).unflatten(2, (-1, LINE)).contiguous()
