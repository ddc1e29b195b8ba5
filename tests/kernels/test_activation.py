"""The kernels of activations and of the soft cap against their references."""

import pytest
import torch

from pagewire.worker.ops.reference import activation as reference
from pagewire.worker.ops.triton.rowwise import activation
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

SHAPES = [(1, 1), (3, 96), (2, 1025), (40, 7)]
if FULL_SIZE:
    SHAPES += [(1, 3072), (4096, 3072), (70000, 64), (513, 14336)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "intermediate"), SHAPES)
def test_silu_mul(tokens, intermediate, dtype, device):
    torch.manual_seed(tokens + intermediate)
    gate_up = (4 * torch.randn(tokens, 2 * intermediate, device=device)).to(dtype)
    with poisoned_outputs():
        out = activation.silu_mul(gate_up)
    assert_near(out, reference.silu_mul(gate_up), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 64, 40), (5, 100, 1030)])
def test_unscaled_input_is_scaled(tokens, hidden, intermediate, dtype, device):
    torch.manual_seed(tokens)
    x = (4 * torch.randn(tokens, hidden, device=device)).to(dtype)
    gate_up = (8 * torch.randn(tokens, 2 * intermediate, device=device)).to(dtype)
    with poisoned_outputs():
        out = activation.silu_mul(gate_up, x, 1e-2)
    expected = reference.silu_mul(gate_up, x, 1e-2)
    assert_near(out, expected, TOLERANCE[dtype])
    root = (x.float().square().mean(1, keepdim=True) + 1e-2).sqrt()
    divided = reference.silu_mul(gate_up.float() / root).to(dtype)
    assert_near(expected, divided, TOLERANCE[dtype])


def test_large_gates_saturate(device):
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 2.0, 5.0]], device=device)
    assert activation.silu_mul(gate_up).tolist() == [[0.0, 400.0, 0.0]]


def test_no_tokens(device):
    assert activation.silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activate(name, gated, dtype, device):
    torch.manual_seed(7)
    x = (4 * torch.randn(3, 1030, device=device)).to(dtype)
    with poisoned_outputs():
        out = activation.activate(x, name, gated=gated)
    expected = reference.activate(x, name, gated=gated)
    assert out.shape == (3, 515 if gated else 1030)
    assert_near(out, expected, TOLERANCE[dtype])
    others = {"silu", "gelu", "gelu_tanh"} - {name}
    wide = x.float()
    exact = reference.activate(wide, name, gated=gated)
    assert all(not exact.equal(reference.activate(wide, other, gated=gated)) for other in others)


def test_gated_silu_is_silu_mul(device):
    x = torch.randn(5, 96, device=device)
    expected = reference.silu_mul(x)
    assert_near(reference.activate(x, "silu", gated=True), expected, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 1030])
def test_soft_cap(count, dtype, device):
    x = (40 * torch.randn(3, count, device=device)).to(dtype)
    expected = reference.soft_cap(x.clone(), 30.0)
    assert expected.abs().max() <= 30
    assert_near(expected, (30 * torch.tanh(x.float() / 30)).to(dtype), TOLERANCE[dtype])
    out = activation.soft_cap(x, 30.0)
    assert out is x
    assert_near(x, expected, TOLERANCE[dtype])


def test_soft_cap_saturates(device):
    x = torch.tensor([[-9e4, 0.0, 9e4]], device=device)
    assert activation.soft_cap(x, 50.0).tolist() == [[-50.0, 0.0, 50.0]]
    assert activation.soft_cap(torch.empty(0, 7, device=device), 50.0).shape == (0, 7)
    assert activation.activate(torch.empty(0, 64, device=device), "gelu", gated=True).shape == (
        0,
        32,
    )
