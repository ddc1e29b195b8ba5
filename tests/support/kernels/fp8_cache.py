"""KV caches in FP8, quantized by code that is independent of the operations."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.blocks import KVScales

NAN_BITS = 0x7F  # of E4M3


def quantized(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The FP8 numbers and scales of `cache [blocks, kv_heads, block_size, head_dim]`.

    Vectors with NaN have NaN in both, so that a kernel that reads them fails the test.
    """
    wide = cache.double()
    scales = (wide.abs().amax(-1) / 448).clamp(min=2.0**-126)
    numbers = (wide / scales[..., None]).float().to(torch.float8_e4m3fn)
    return numbers, scales.float()


def quantized_pair(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, KVScales]:
    """The FP8 numbers of keys and of values, and the scales of both."""
    (keys, key_scales), (values, value_scales) = quantized(k), quantized(v)
    return keys, values, KVScales(key_scales, value_scales)


def widened(numbers: Tensor, scales: Tensor) -> Tensor:
    """The values in float32; 0 where they are not finite."""
    return (numbers.float() * scales[..., None]).nan_to_num(0.0, 0.0, 0.0)
