"""KV blocks: the sizes that kernels can read, and the copy between two memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from pagewire.worker.errors import SetupError

# The Triton kernels read this many KV positions as one run, so a block must hold whole runs.
RUN = 16
# The largest value of an FP8 cache, which is in E4M3.
FP8_LARGEST = 448.0
# The smallest normal float32, the least scale: quotients by it are finite.
MIN_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of a layer's FP8 cache: a head's key or value is its FP8 numbers times a scale.

    The scale of a token and head is its largest magnitude divided by `FP8_LARGEST`, and at least
    `MIN_SCALE`.
    """

    keys: Tensor  # [num_blocks, kv_heads, block_size] float32, contiguous
    values: Tensor  # [num_blocks, kv_heads, block_size] float32, contiguous


def check_block_size(block_size: int, ops: Literal["torch", "triton"]) -> None:
    """Raise SetupError if the operations cannot read blocks of `block_size` positions."""
    if ops == "triton" and block_size % RUN:
        raise SetupError(
            f"block_size {block_size} is not a multiple of {RUN}, and the triton operations read "
            f"blocks in runs of {RUN} positions: choose a multiple, or --ops torch"
        )


class BlockOps(Protocol):
    """Copies between the device and the host."""

    def copy_blocks(
        self, source: Tensor, sources: Tensor, target: Tensor, targets: Tensor
    ) -> Tensor:
        """Copy blocks `sources` of `source` to blocks `targets` of `target`.

        A part is the keys or the values of one layer. One of the two memories may be pinned memory
        of the host; the other one is then the device's.

        Args:
            source: `[parts, blocks, values]`. The values of a part of a block are adjacent; the
                other two dimensions may have any stride.
            sources: `[copies]` int32.
            target: `[parts, other blocks, values]`, written in place.
            targets: `[copies]` int32, distinct.

        Returns:
            `target`.
        """
