"""Copying KV blocks between two memories in plain torch; see `contract.blocks`."""

from __future__ import annotations

from torch import Tensor

# Blocks copied at a time. Copies need memory outside the caches, and little may be left.
_AT_ONCE = 16


def copy_blocks(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> Tensor:
    for begin in range(0, len(sources), _AT_ONCE):
        end = begin + _AT_ONCE
        values = source[:, sources[begin:end].to(source.device)]
        target[:, targets[begin:end].to(target.device)] = values.to(target.device)
    return target
