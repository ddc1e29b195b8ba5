"""Copying KV blocks between two memories in plain torch."""

from __future__ import annotations

from torch import Tensor

# Blocks on their way through memory outside the caches, which may leave little.
_AT_ONCE = 16


def copy_blocks(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> Tensor:
    """Copy blocks `sources` of one memory to blocks `targets` of another.

    Args:
        source: `[parts, blocks, values]`, the parts of all blocks: keys and values by layer. The
            values of a part of a block lie side by side, the rest may have any stride.
        sources: `[copies]` int32.
        target: `[parts, other blocks, values]`, written in place. One of the two memories may be
            the host's: then it is pinned, and the other the device's.
        targets: `[copies]` int32, distinct.

    Returns:
        `target`.
    """
    for begin in range(0, len(sources), _AT_ONCE):
        end = begin + _AT_ONCE
        values = source[:, sources[begin:end].to(source.device)]
        target[:, targets[begin:end].to(target.device)] = values.to(target.device)
    return target
