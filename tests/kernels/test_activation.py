"""The kernel of the gated activation against its reference."""

import pytest
import torch

from pagewire.worker.ops.reference import activation as reference
from pagewire.worker.ops.triton import activation
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
