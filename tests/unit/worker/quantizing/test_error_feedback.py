"""Rounding with error feedback against the definition, column by column in float64."""

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops.reference.quantized import dequantized
from pagewire.worker.quantizing.error_feedback import DAMPING, round_with_feedback

SCHEMES = [
    Fp8Scheme(),
    Int8Scheme(),
    GroupedScheme(bits=4, group=32, symmetric=True),
    GroupedScheme(bits=4, group=256, symmetric=True),
    GroupedScheme(bits=4, group=None, symmetric=True),
    GroupedScheme(bits=8, group=64, symmetric=True),
]


def correlated(columns: int) -> tuple[Tensor, Tensor]:
    """Weights `[48, columns]`, and inputs `[600, columns]` of which many resemble each other."""
    generator = torch.Generator().manual_seed(columns)
    few = torch.randn(600, columns // 8, generator=generator)
    mixed = few @ torch.randn(columns // 8, columns, generator=generator)
    inputs = mixed + 0.3 * torch.randn(600, columns, generator=generator)
    return torch.randn(48, columns, generator=generator), inputs


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_outputs_change_less(scheme: Scheme) -> None:
    weight, inputs = correlated(512)
    fed_back = dequantized(round_with_feedback(weight, inputs.t() @ inputs, scheme, torch.float32))
    nearest = dequantized(quantize_weight(weight, scheme, torch.float32))
    changes = [((found - weight) @ inputs.t()).norm() for found in (fed_back, nearest)]
    assert changes[0] < 0.6 * changes[1]
    # Values themselves are further from the plain ones.
    assert (fed_back - weight).norm() > (nearest - weight).norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_inputs_without_correlation_change_nothing(scheme: Scheme) -> None:
    weight, _ = correlated(512)
    squares = torch.diag(torch.rand(512) + 0.5)
    squares[7, 7] = 0.0  # an input that is always 0
    found = round_with_feedback(weight, squares, scheme, torch.float32)
    assert torch.equal(
        dequantized(found), dequantized(quantize_weight(weight, scheme, torch.float32))
    )


def test_each_error_is_made_up_for_as_the_method_says() -> None:
    """With the inverse of the remaining matrix recomputed for each column."""
    weight, inputs = correlated(160)
    squares = inputs.t() @ inputs
    scheme = GroupedScheme(bits=4, group=32, symmetric=True)
    left = weight.double().clone()
    damped = squares.double() + DAMPING * squares.double().diagonal().mean() * torch.eye(160)
    expected = torch.empty_like(left)
    scales = torch.empty(48, 1)
    for column in range(160):
        if column % 32 == 0:
            scales = left[:, column : column + 32].float().abs().amax(1, keepdim=True) / 7.5
        steps = (left[:, column : column + 1].float() / scales).round().clamp(-8, 7)
        expected[:, column] = (steps * scales)[:, 0]
        inverse = damped[column:, column:].inverse()
        error = (left[:, column] - expected[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    found = dequantized(round_with_feedback(weight, squares, scheme, torch.float32)).double()
    # Rounding in float32 may move a value across a midpoint, which changes all later columns.
    assert (found - expected).abs().gt(1e-3).double().mean() < 0.02
