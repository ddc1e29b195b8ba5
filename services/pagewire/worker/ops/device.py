"""What a launch needs to know of the device it runs on."""

from __future__ import annotations

from functools import cache

import torch

# The interpreter runs programs one after another: a few are enough to split and to merge.
_INTERPRETED_PROCESSORS = 5


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs of one per multiprocessor fill the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Tell whether a kernel may start before its predecessor has ended (Hopper and later)."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))
