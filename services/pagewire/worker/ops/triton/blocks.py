"""The kernel that copies KV blocks between two memories, one of which may be the host's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.integers import cdiv

# Values that a program copies. With 2 bytes a value, each thread reads 16 bytes four times, which
# is enough to hide the latency of the bus.
_PIECE = 4096


def copy_blocks(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> Tensor:
    """Implement `BlockOps.copy_blocks` in one launch.

    The kernel reads or writes pinned memory of the host over the bus.
    """
    parts, _, values = source.shape
    assert target.shape[0] == parts
    assert target.shape[2] == values
    assert source.stride(2) == target.stride(2) == 1
    if len(sources):
        _copy_kernel[(len(sources), parts, cdiv(values, _PIECE))](
            source,
            sources,
            target,
            targets,
            source.stride(0),
            source.stride(1),
            target.stride(0),
            target.stride(1),
            VALUES=values,
            PIECE=_PIECE,
        )
    return target


@triton.jit
def _copy_kernel(
    source_ptr,
    sources_ptr,
    target_ptr,
    targets_ptr,
    source_part_stride,
    source_block_stride,
    target_part_stride,
    target_block_stride,
    VALUES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Copy blocks.

    A program copies PIECE values of one part of one block. The grid is `[copies, parts, pieces]`.
    """
    copy, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    mask = columns < VALUES
    read = tl.load(sources_ptr + copy).to(tl.int64)
    written = tl.load(targets_ptr + copy).to(tl.int64)
    source_ptr += part * source_part_stride + read * source_block_stride
    target_ptr += part * target_part_stride + written * target_block_stride
    tl.store(target_ptr + columns, tl.load(source_ptr + columns, mask), mask)
