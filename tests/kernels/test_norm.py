"""The normalization kernels against their references."""

import pytest
import torch

from pagewire.worker.ops.reference import norm as reference
from pagewire.worker.ops.triton.rowwise import norm
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

SHAPES = [(1, 1), (1, 64), (3, 100), (17, 640), (300, 24)]
if FULL_SIZE:
    SHAPES += [(1, 1024), (255, 4096), (4096, 1024), (513, 5120), (1000, 16384)]


def _inputs(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple:
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm(tokens, hidden, dtype, device):
    x, weight = _inputs(tokens, hidden, dtype, device)
    with poisoned_outputs():
        out = norm.rms_norm(x, weight, 1e-5)
    assert_near(out, reference.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])


def test_weight_is_optional(device):
    x = torch.randn(5, 100, device=device)
    out = norm.rms_norm(x, None, 1e-6)
    assert_near(out, reference.rms_norm(x, torch.ones(100, device=device), 1e-6), 2e-6)
    assert_near(reference.rms_norm(x, None, 1e-6), out, 2e-6)


def test_few_values_are_normalized_late_and_never_in_float16(device):
    few = torch.empty(128, 4096, dtype=torch.bfloat16, device=device)
    assert norm.scales_late(few)
    assert norm.scales_late(few.float())
    assert not norm.scales_late(few.half())
    assert not norm.scales_late(torch.empty(136, 4096, dtype=torch.bfloat16, device=device))


def test_rows_may_have_any_stride(device):
    x = torch.randn(5, 96, device=device)
    weight = torch.randn(64, device=device)
    out = norm.rms_norm(x[:, :64], weight, 1e-6)
    assert_near(out, reference.rms_norm(x[:, :64], weight, 1e-6), 2e-6)


def test_no_tokens(device):
    weight = torch.ones(64, device=device)
    assert norm.rms_norm(torch.empty(0, 64, device=device), weight, 1e-6).shape == (0, 64)


def test_zero_row_stays_zero(device):
    x = torch.zeros(2, 32, device=device)
    assert norm.rms_norm(x, torch.ones(32, device=device), 1e-6).abs().max() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_layer_norm(tokens, hidden, bias, dtype, device):
    x, weight = _inputs(tokens, hidden, dtype, device)
    x += 3  # a mean that an RMSNorm does not remove
    shift = torch.randn(hidden, device=device).to(dtype) if bias else None
    with poisoned_outputs():
        out = norm.layer_norm(x, weight, shift, 1e-2)
    expected = reference.layer_norm(x, weight, shift, 1e-2)
    assert_near(out, expected, TOLERANCE[dtype])
    wide = x.float() - x.float().mean(1, keepdim=True)
    wide = wide / (wide.square().mean(1, keepdim=True) + 1e-2).sqrt() * weight.float()
    wide = wide if shift is None else wide + shift.float()
    assert_near(expected, wide.to(dtype), TOLERANCE[dtype])


def test_layer_norm_of_no_tokens_and_of_any_stride(device):
    weight = torch.ones(64, device=device)
    assert norm.layer_norm(torch.empty(0, 64, device=device), weight, None, 1e-6).shape == (0, 64)
    x = torch.randn(5, 96, device=device)[:, :64]
    expected = reference.layer_norm(x, weight, None, 1e-6)
    assert_near(norm.layer_norm(x, weight, None, 1e-6), expected, 2e-6)


def test_half_precision_takes_a_norm_weight_of_float32(device):
    x = torch.randn(3, 64, device=device).half()
    weight = 1 + torch.randn(64, device=device) / 1000  # float16 rounds it to steps of 1/1024
    out = norm.rms_norm(x, weight, 1e-6)
    assert_near(out, reference.rms_norm(x, weight, 1e-6), TOLERANCE[torch.float16])
    assert out.dtype == torch.float16
