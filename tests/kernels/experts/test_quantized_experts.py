"""The grouped GEMMs of quantized experts against their references, and these against torch."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import (
    Fp8Scheme,
    GroupedScheme,
    Int8Scheme,
    Scheme,
)
from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routes
from pagewire.worker.ops.contract.quantized import FLOAT4, QuantizedInput, ScaledWeight
from pagewire.worker.ops.reference import experts as reference
from pagewire.worker.ops.reference import quantized as reference_quantized
from pagewire.worker.ops.triton import experts
from pagewire.worker.ops.triton.experts import scaled_hopper
from pagewire.worker.ops.triton.rowwise.quantize import quantize_rows
from support.kernels.comparison import (
    DTYPES,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)

MXFP4 = GroupedScheme(bits=4, group=32, symmetric=True, float4=True)
SCHEMES: dict[str, Scheme] = {
    "fp8": Fp8Scheme(),
    "fp8 in blocks": Fp8Scheme(block=(128, 128)),
    "int8": Int8Scheme(),
    "groups of 32": GroupedScheme(bits=4, group=32, symmetric=True),
    "groups of 128 with zero points": GroupedScheme(bits=4, group=128, symmetric=False),
    "channels of 8 bits": GroupedScheme(bits=8, group=None, symmetric=False),
    "mxfp4": MXFP4,
}
CLAMP = ClampedSwiglu(1.702, 0.9)


@dataclass(frozen=True)
class Layer:
    """A layer with random experts, quantized, and 19 tokens with three experts each."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    chosen: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor


def draw(dtype: torch.dtype, device: torch.device, hidden: int, intermediate: int) -> Layer:
    torch.manual_seed(hidden)
    count, tokens = 5, 19

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return Layer(
        x=normal(tokens, hidden),
        gate_up=normal(count, 2 * intermediate, hidden) * hidden**-0.5,
        down=normal(count, hidden, intermediate) * intermediate**-0.5,
        chosen=torch.randn(tokens, count, device=device).argsort(1)[:, :3].int(),
        gate_up_bias=normal(count, 2 * intermediate),
        down_bias=normal(count, hidden),
    )


def given(x: Tensor, weight: object) -> Tensor | QuantizedInput:
    if isinstance(weight, ScaledWeight):
        return reference_quantized.quantize(x, weight.input_format)
    return x


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_experts(name, dtype, tile, device):
    sizes = (256, 128) if tile == 16 else (160, 96)
    if name == "fp8 in blocks":
        sizes = (256, 128)
    layer = draw(dtype, device, *sizes)
    rows = experts.sort_by_expert(layer.chosen, 5, tile=tile)
    for clamp, biases in ((None, (None, None)), (CLAMP, (layer.gate_up_bias, layer.down_bias))):
        gate_up = quantize_weight(layer.gate_up.flatten(0, 1), SCHEMES[name], dtype)
        down = quantize_weight(layer.down.flatten(0, 1), SCHEMES[name], dtype)
        x = given(layer.x, gate_up)
        with poisoned_outputs():
            gated = experts.experts_gate_up_silu_mul(x, gate_up, rows, biases[0], clamp)
        expected = reference.experts_gate_up_silu_mul(x, gate_up, rows, biases[0], clamp)
        assert_near(gated, expected, 2 * TOLERANCE[dtype])
        inner = given(expected, down)
        with poisoned_outputs():
            parts = experts.experts_down(inner, down, rows, biases[1])
        expected = reference.experts_down(inner, down, rows, biases[1])
        assert_near(parts, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_reference_is_near_plain_experts(name, device):
    layer = draw(torch.float32, device, 256, 128)
    rows = reference.sort_by_expert(layer.chosen, 5)
    plain = reference.experts_gate_up_silu_mul(layer.x, layer.gate_up, rows, layer.gate_up_bias)
    weight = quantize_weight(layer.gate_up.flatten(0, 1), SCHEMES[name], torch.float32)
    x = given(layer.x, weight)
    found = reference.experts_gate_up_silu_mul(x, weight, rows, layer.gate_up_bias)
    assert 1e-4 < float((found - plain).norm() / plain.norm()) < 0.2


def test_the_bits_of_four_bit_numbers(device):
    """All numbers of E2M1, with the smallest and the largest scale that models have."""
    numbers = torch.tensor(FLOAT4, device=device)
    weight = torch.cat([numbers.repeat(2) * 2.0**power for power in (-20, 0, 3, 7)])[None]
    packed = quantize_weight(weight, MXFP4, torch.float32)
    assert torch.equal(reference_quantized.dequantized(packed), weight)
    assert packed.scales.tolist() == [[107, 127, 130, 134]]
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    rows = experts.sort_by_expert(one.expand(128, 1).contiguous(), 1)
    found = experts.experts_down(torch.eye(128, device=device), packed, rows)
    assert torch.equal(found, weight.T)


def test_without_tokens_nothing_runs(device):
    layer = draw(torch.float32, device, 64, 32)
    rows = experts.sort_by_expert(layer.chosen[:0], 5)
    weight = quantize_weight(layer.gate_up.flatten(0, 1), MXFP4, torch.float32)
    assert experts.experts_gate_up_silu_mul(layer.x[:0], weight, rows).shape == (0, 32)


@pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks", "fp8 with a static scale"])
@pytest.mark.parametrize(
    ("tokens", "k", "features"), [(1, 2048, 768), (150, 384, 896), (1500, 768, 2048)]
)
def test_hoppers_kernel_has_the_bits_of_the_plain_one(tokens, k, features, name, gated, device):
    """Experts without rows, with few, and with tiles that are not full; one expert has half.

    The last size has more tiles than there are programs.
    """
    torch.manual_seed(tokens)
    count, top_k = 9, 2
    chosen = torch.randn(tokens, count - 1, device=device).argsort(1)[:, :top_k].int()
    chosen[: tokens // 2, 0] = 8
    rows = experts.sort_by_expert(chosen, count, tile=scaled_hopper.TILE.value)
    plain = torch.randn(count * features * (2 if gated else 1), k, device=device) * k**-0.5
    scheme = SCHEMES["fp8 in blocks" if name == "fp8 in blocks" else "fp8"]
    weight = quantize_weight(plain, scheme, torch.bfloat16)
    if name == "fp8 with a static scale":
        weight = replace(weight, input_scale=torch.full((1,), 0.02, device=device))
    x = torch.randn(tokens if gated else tokens * top_k, k, device=device).bfloat16()
    project = experts.experts_gate_up_silu_mul if gated else experts.experts_down
    expected = project(given(x, weight), weight, rows)
    of_tokens = rows.rows.view(tokens, top_k) if gated else None
    by_row = quantize_rows(x, weight.input_format, of_tokens, scaled_hopper.TAIL)
    out = torch.full_like(expected, torch.nan)
    scaled_hopper.multiply(by_row, weight, out, rows, gated=gated)
    assert torch.equal(out, expected)


@pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")
@pytest.mark.parametrize("tokens", [130, 700])
@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks"])
def test_a_layer_on_hopper_has_the_bits_of_the_plain_kernels(name, tokens, device, monkeypatch):
    """Kernels follow one another; each may start before the previous one has ended."""
    torch.manual_seed(tokens)
    count, hidden, intermediate = 16, 1024, 384
    x, residual = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
    order = torch.randn(tokens, count, device=device).argsort(1)[:, :4].int().contiguous()
    routes = Routes(order, torch.rand(tokens, 4, device=device).softmax(1))
    shapes = ((2 * intermediate, hidden), (hidden, intermediate))
    weights = [
        quantize_weight(torch.randn(count * n, k, device=device), SCHEMES[name], torch.bfloat16)
        for n, k in shapes
    ]
    for weight in weights:
        assert scaled_hopper.is_supported(x.dtype, weight, 4 * tokens, count)
    found = [experts.experts_add(x, routes, count, *weights, residual.clone()) for _ in range(9)]
    monkeypatch.setattr(scaled_hopper, "is_supported", lambda *_: False)
    expected = experts.experts_add(x, routes, count, *weights, residual.clone())
    assert all(torch.equal(out, expected) for out in found)
