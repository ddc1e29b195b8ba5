"""KV blocks: the sizes that kernels can read, and the copy between two memories."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from pagewire.worker.errors import SetupError

# The Triton kernels read this many KV positions as one run, so a block must hold whole runs.
RUN = 16


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

        A part is the keys or the values of one layer. One of the two memories may be the host's:
        it is then pinned, and the other one is the device's.

        Args:
            source: `[parts, blocks, values]`. The values of a part of a block are adjacent; the
                other two dimensions may have any stride.
            sources: `[copies]` int32.
            target: `[parts, other blocks, values]`, written in place.
            targets: `[copies]` int32, distinct.

        Returns:
            `target`.
        """
