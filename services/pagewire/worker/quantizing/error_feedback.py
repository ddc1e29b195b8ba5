"""Rounds weights so that outputs change little: later columns compensate the error of earlier ones.

This is the method of Frantar et al., 2023, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers". Columns keep their order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire.worker.model.quantization.packing import pack_runs
from pagewire.worker.model.quantization.quantizer import group_scales, group_values, scaled_weight
from pagewire.worker.model.quantization.scheme import GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops.contract.quantized import (
    LARGEST,
    GroupedWeight,
    QuantizedWeight,
    ScaledWeight,
)

# This part of the diagonal's mean is added to the diagonal, so that the matrix has an inverse.
DAMPING = 0.01
# Columns after a block are corrected once for all its columns. A group of fewer columns lies in one
# block, and a larger group begins with a block, so its scales are those of corrected columns.
_BLOCK = 128

# Rounds a column: its index and the corrected weight `[rows, columns]`, to `[rows]`, dequantized.
Rounding = Callable[[int, Tensor], Tensor]


def round_with_feedback(
    weight: Tensor, squares: Tensor, scheme: Scheme, dtype: torch.dtype
) -> QuantizedWeight:
    """The quantized form of a weight that changes `x @ weight.T` little for the inputs seen.

    Args:
        weight: `[out_features, in_features]`.
        squares: `[in_features, in_features]` float32, `x.T @ x` of the inputs, on any scale.
        scheme: symmetric groups of a power of two of inputs, or one scale for each channel.
        dtype: of the scales of a grouped weight.
    """
    if isinstance(scheme, GroupedScheme):
        return _grouped(weight, squares, scheme, dtype)
    if isinstance(scheme, Int8Scheme):
        return _scaled(weight, squares, torch.int8)
    assert scheme.block is None
    return _scaled(weight, squares, torch.float8_e4m3fn)


def _grouped(
    weight: Tensor, squares: Tensor, scheme: GroupedScheme, dtype: torch.dtype
) -> GroupedWeight:
    assert scheme.symmetric
    assert not scheme.ordered
    rows, columns = weight.shape
    group = scheme.group or columns
    values = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // group), dtype=dtype)
    zeros = torch.full((rows, 1), float(1 << (scheme.bits - 1)))

    def rounded(column: int, corrected: Tensor) -> Tensor:
        at = column // group
        if column % group == 0:
            inputs = corrected[:, None, column : column + group]
            scales[:, at : at + 1] = group_scales(inputs, scheme, dtype)[0]
        scale = scales[:, at : at + 1]
        whole = group_values(corrected[:, column, None, None], scale, zeros, scheme.bits)
        values[:, column] = whole.view(rows)
        return ((whole.view(rows, 1).float() - zeros) * scale.float()).view(rows)

    _feed_back(weight, squares, rounded)
    packed = pack_runs(values) if scheme.bits == 4 else values
    return GroupedWeight(packed, scales, None, None, scheme.bits, group, columns)


def _scaled(weight: Tensor, squares: Tensor, kind: torch.dtype) -> ScaledWeight:
    plain = scaled_weight(weight, (1, weight.shape[1]), kind)
    values, scales = plain.values.clone(), plain.scales.view(-1)
    limit = LARGEST[kind]

    def rounded(column: int, corrected: Tensor) -> Tensor:
        scaled = (corrected[:, column] / scales).clamp(-limit, limit)
        values[:, column] = (scaled.round() if kind == torch.int8 else scaled).to(kind)
        return values[:, column].float() * scales

    _feed_back(weight, squares, rounded)
    return ScaledWeight(values, plain.scales, plain.block, None)


def _feed_back(weight: Tensor, squares: Tensor, rounded: Rounding) -> None:
    """Calls `rounded` for each column in order, corrected for the errors of earlier columns."""
    corrected, columns = weight.float().clone(), weight.shape[1]
    factors = _correction_factors(squares)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(len(corrected), stop - start)
        for column in range(start, stop):
            change = corrected[:, column] - rounded(column, corrected)
            error = change / factors[column, column]
            corrected[:, column:stop] -= error[:, None] * factors[column, column:stop]
            errors[:, column - start] = error
        corrected[:, stop:] -= errors @ factors[start:stop, stop:]


def _correction_factors(squares: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of `squares`, `[columns, columns]`.

    Columns whose inputs were always 0 correct no other column, and no other column corrects them.
    """
    damped = squares.double()
    diagonal = damped.diagonal()
    unseen = diagonal == 0
    diagonal += DAMPING * diagonal.mean()
    diagonal[unseen] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factors.float()
