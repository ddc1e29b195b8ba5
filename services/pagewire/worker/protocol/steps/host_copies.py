"""Which copies between the device and the host's memory a step may name."""

import numpy as np

from pagewire.errors import invalid
from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import StepHostCopies


def check_host_copies(copies: StepHostCopies, limits: Limits) -> None:
    """RequestError INVALID_ARGUMENT names the field that names a wrong block, or one twice."""
    device, host = (1, limits.num_blocks), (0, limits.host_blocks)
    _check("saved_blocks", copies.saved, *device)
    _check("saved_host_blocks", copies.saved_host, *host)
    _check("loaded_host_blocks", copies.loaded_host, *host)
    _check("loaded_blocks", copies.loaded, *device)


def _check(field: str, blocks: Int32Array, first: int, end: int) -> None:
    if not len(blocks):
        return
    if blocks.min() < first or blocks.max() >= end:
        wrong = blocks[(blocks < first) | (blocks >= end)][0]
        there = f"blocks {first} to {end - 1}" if end > first else "none (--host-memory-gb)"
        raise invalid(field, f"{field} names block {wrong}; this worker has {there}")
    if len(np.unique(blocks)) < len(blocks):
        raise invalid(field, f"{field} names a block twice")
