"""Properties of a device that kernel launches depend on."""

from __future__ import annotations

from functools import cache

import torch

# Triton's interpreter runs programs one after another. A few are enough to test how work is split
# and merged.
_INTERPRETED_PROCESSORS = 5


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; a small constant where there is no GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Tell whether the device has programmatic dependent launch (PDL): Hopper and later.

    With PDL a kernel may start before the previous kernel has ended.
    """
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


@cache
def is_hopper(device: torch.device) -> bool:
    """Tell whether the device is sm_90, the only architecture that has Hopper's instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def step_stream() -> torch.cuda.Stream:
    """Return the stream of all steps, the default one.

    Looking up the current stream takes 5 us, and a step uses it six times.
    """
    return torch.cuda.default_stream()
