"""Quantizes plain weights: values are rounded to the nearest, scales follow the magnitudes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.model.quantization.packing import pack_runs
from pagewire.worker.model.quantization.scheme import GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops.contract.quantized import (
    FLOAT4,
    LARGEST,
    GroupedWeight,
    QuantizedWeight,
    ScaledWeight,
)


def quantize_weight(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """The quantized form of `weight [out_features, in_features]`, on its device.

    Inputs have dynamic scales. `dtype` is the type of the scales of a grouped weight.
    """
    if isinstance(scheme, GroupedScheme):
        return _grouped(weight, scheme, dtype)
    if isinstance(scheme, Int8Scheme):
        return scaled_weight(weight, (1, weight.shape[1]), torch.int8)
    block = scheme.block or (1, weight.shape[1])
    return scaled_weight(weight, block, torch.float8_e4m3fn)


def scaled_weight(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> ScaledWeight:
    """`weight` in eight bits with a scale for each block of rows and columns."""
    rows, columns = weight.shape
    height, width = block
    wide = F.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = wide.view(wide.shape[0] // height, height, wide.shape[1] // width, width)
    scales = blocks.abs().amax((1, 3)) / LARGEST[dtype]
    scales = torch.where(scales == 0, 1.0, scales)
    scaled = blocks / scales[:, None, :, None]
    if dtype == torch.int8:
        scaled = scaled.round()
    values = scaled.view_as(wide)[:rows, :columns].to(dtype)
    return ScaledWeight(values.contiguous(), scales, block, None)


def _grouped(weight: Tensor, scheme: GroupedScheme, dtype: torch.dtype) -> GroupedWeight:
    rows, columns = weight.shape
    group = scheme.group or columns
    wide = F.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    if scheme.float4:
        return _float4(wide, columns)
    scales, zeros = group_scales(wide, scheme, dtype)
    values = group_values(wide, scales, zeros, scheme.bits).flatten(1)[:, :columns]
    packed = pack_runs(values) if scheme.bits == 4 else values.contiguous()
    return GroupedWeight(
        values=packed,
        scales=scales,
        zeros=None if scheme.symmetric else zeros.to(torch.uint8),
        order=torch.arange(columns, dtype=torch.int32, device=weight.device)
        if scheme.ordered
        else None,
        bits=scheme.bits,
        group=group,
        columns=columns,
    )


def _float4(wide: Tensor, columns: int) -> GroupedWeight:
    """The MXFP4 form of `wide [rows, groups, n]`.

    As the OCP Microscaling specification says, a group's scale is 2^(floor(log2(highest)) - 2). So
    its largest magnitude becomes at least 4 and less than 8, and above 6 it is rounded down to 6.
    """
    highest = wide.abs().amax(-1)
    exponents = torch.where(highest == 0, -127.0, highest.log2().floor() - 2).clamp(-127, 127)
    scaled = wide / exponents.exp2().unsqueeze(-1)
    steps = torch.tensor(FLOAT4[:8], device=wide.device)
    middles = (steps[1:] + steps[:-1]) / 2
    values = torch.bucketize(scaled.abs(), middles) + 8 * (scaled < 0)
    return GroupedWeight(
        values=pack_runs(values.to(torch.uint8).flatten(1)[:, :columns]),
        scales=(exponents + 127).to(torch.uint8),
        zeros=None,
        order=None,
        bits=4,
        group=wide.shape[2],
        columns=columns,
        float4=True,
    )


def group_scales(wide: Tensor, scheme: GroupedScheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales in `dtype` and zero points in float32 of `wide [rows, groups, n]`.

    Both are `[rows, groups]`.
    """
    steps = float((1 << scheme.bits) - 1)
    if scheme.symmetric:
        scales = wide.abs().amax(-1) / (steps / 2)
        zeros = torch.full_like(scales, float(1 << (scheme.bits - 1)))
    else:
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scales = (high - low) / steps
        zeros = (-low / torch.where(scales == 0, 1.0, scales)).round().clamp(0, steps)
    return torch.where(scales == 0, 1.0, scales).to(dtype), zeros


def group_values(wide: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """The integers of `[rows, groups, n]` for these scales, uint8."""
    scaled = wide / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
    return scaled.round().clamp(0, (1 << bits) - 1).to(torch.uint8)
