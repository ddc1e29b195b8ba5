"""The kernels of quantized linear layers against their references."""

from dataclasses import replace

import pytest
import torch

from pagewire.worker.model.quantization.quantizer import quantize_weight, scaled_weight
from pagewire.worker.model.quantization.scheme import GroupedScheme
from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    InputFormat,
    QuantizedInput,
    ScaledWeight,
)
from pagewire.worker.ops.reference import quantized as reference
from pagewire.worker.ops.triton.invariant import quantized as ordered
from pagewire.worker.ops.triton.quantized import grouped, linear, scaled
from pagewire.worker.ops.triton.quantized.tiles import Tiles
from pagewire.worker.ops.triton.rowwise import quantize
from support.kernels.comparison import (
    CUDA,
    DTYPES,
    FP8_SUM,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)

EPS = 1e-5
FUSED_TOLERANCE = 0.01  # single inputs differ by one step, which is 6 % of an input
EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]
SMALL = Tiles(rows=64, tokens=16, warps=4, stages=2)
# tokens, k, features
SHAPES = [(1, 128, 64), (3, 256, 100), (17, 200, 70)]
if FULL_SIZE:
    SHAPES += [(1, 4096, 4096), (16, 4096, 6144), (200, 14336, 4096), (2048, 4096, 6144)]


def draw(*shape: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device=device)


def assert_same_numbers(out, expected) -> None:
    """Values may differ if an input lies between two steps; on the CPU they are equal."""
    assert out.values.dtype == expected.values.dtype
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out.scales, expected.scales.expand_as(out.scales), rtol=1e-6, atol=0)
    differ = (out.values.float() != expected.values.float()).float().mean()
    assert differ <= (0 if out.values.device.type == "cpu" else 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eight", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("kind", ["token", "groups", "static"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 200), (3, 384)])
class TestInputs:
    def format(self, kind, eight, device) -> InputFormat:
        scale = torch.full((1,), 0.01, device=device) if kind == "static" else None
        return InputFormat(eight, 128 if kind == "groups" else None, scale)

    def test_quantize(self, tokens, width, kind, eight, dtype, device):
        x = draw(tokens, width, device=device).to(dtype)
        x[0, : width // 2] = 0  # with 64 columns and more, a group of zeros
        given = self.format(kind, eight, device)
        with poisoned_outputs():
            out = quantize.quantize(x, given)
        assert_same_numbers(out, reference.quantize(x, given))

    def test_quantize_rows(self, tokens, width, kind, eight, dtype, device):
        x = draw(tokens, width, device=device).to(dtype)
        given, order = self.format(kind, eight, device), torch.randperm(3 * tokens, device=device)
        rows = order.int().view(tokens, 3)
        for places in (rows, None):
            with poisoned_outputs():
                out = quantize.quantize_rows(x, given, places, 7)
            expected = x
            if places is not None:
                expected = torch.empty(3 * tokens, width, dtype=dtype, device=device)
                expected[order] = x.repeat_interleave(3, 0)
            assert_same_numbers(out, reference.quantize(expected, given))
            if kind == "groups":
                assert out.scales.stride() == (1, len(expected) + 7)

    def test_norm_quantize(self, tokens, width, kind, eight, dtype, device):
        x, norm = draw(tokens, width, device=device).to(dtype), draw(width, device=device).to(dtype)
        given = self.format(kind, eight, device)
        for weight in (norm, None):
            out = quantize.norm_quantize(x, weight, EPS, given)
            expected = reference.norm_quantize(x, weight, EPS, given)
            near(out, expected)

    def test_silu_mul_quantize(self, tokens, width, kind, eight, dtype, device):
        x = draw(tokens, 2 * width, device=device).to(dtype)
        given = self.format(kind, eight, device)
        near(quantize.silu_mul_quantize(x, given), reference.silu_mul_quantize(x, given))


def near(out, expected) -> None:
    """Inputs differ in their last bits, so single quantized values may differ by one step."""
    wide = out.values.float() - expected.values.float()
    assert out.values.dtype == expected.values.dtype
    assert (wide != 0).float().mean() < 0.02
    torch.testing.assert_close(out.scales, expected.scales.expand_as(out.scales), rtol=2e-3, atol=0)
    assert_near(out.values.float(), expected.values.float(), 0.01)


def scaled_weights(features: int, k: int, device) -> list[ScaledWeight]:
    wide = draw(features, k, device=device) / k**0.5
    weights = [scaled_weight(wide, (1, k), eight) for eight in EIGHT_BITS]
    weights += [scaled_weight(wide, (height, 128), torch.float8_e4m3fn) for height in (1, 128)]
    return weights


@pytest.fixture(params=["one order", "fastest"])
def products(request, monkeypatch):
    """The products with bits independent of other tokens, and the default ones of workers."""
    if request.param == "fastest":
        monkeypatch.setattr(linear, "WIDEN_TOKENS", 17)
        return linear, linear
    return scaled, grouped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "features"), SHAPES)
class TestScaled:
    def test_scaled_linear(self, tokens, k, features, dtype, device, products):
        x = draw(tokens, k, device=device).to(dtype)
        bias = draw(features, device=device).to(dtype)
        for weight in scaled_weights(features, k, device):
            given = reference.quantize(x, weight.input_format)
            for added in (None, bias):
                with poisoned_outputs():
                    out = products[0].scaled_linear(given, weight, added)
                expected = reference.scaled_linear(given, weight, added)
                assert_near(out, expected, TOLERANCE[dtype])

    def test_scaled_linear_add(self, tokens, k, features, dtype, device, products):
        x = draw(tokens, k, device=device).to(dtype)
        residual = draw(tokens, features, device=device).to(dtype)
        for weight in scaled_weights(features, k, device):
            given = reference.quantize(x, weight.input_format)
            stream = residual.clone()
            assert products[0].scaled_linear_add(given, weight, stream) is stream
            expected = reference.scaled_linear_add(given, weight, residual.clone())
            assert_near(stream, expected, 2 * TOLERANCE[dtype])


# tokens, hidden, features or intermediate
FUSED_SHAPES = [(1, 128, 64), (3, 200, 70)]
if FULL_SIZE:
    FUSED_SHAPES += [
        (1, 4096, 6144),
        (1, 4096, 14336),
        (1, 14336, 4096),
        (1, 1024, 90),
        (40, 4096, 700),
    ]


@pytest.fixture(params=["one order", "fastest"])
def fused(request):
    """The operations that quantize a token and multiply it: those of both modes of workers."""
    return linear if request.param == "fastest" else ordered


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("tokens", "k", "features"), FUSED_SHAPES)
class TestTokensAreQuantizedAndMultiplied:
    """Against the reference. Inputs that lie between two steps may be rounded to either."""

    def weights(self, features, k, static, device) -> list[ScaledWeight]:
        weights = scaled_weights(features, k, device)
        if not static:
            return weights
        scale = torch.full((1,), 0.02, device=device)
        return [replace(weight, input_scale=scale) for weight in weights[:2]]  # no blocks

    def test_norm_quantize_linear(self, tokens, k, features, static, dtype, device, fused):
        x = 3 * draw(tokens, k, device=device).to(dtype)
        norm, bias = (draw(size, device=device).to(dtype) for size in (k, features))
        for weight in self.weights(features, k, static, device):
            for given in ((None, None), (norm, bias)):
                with poisoned_outputs():
                    out = fused.norm_quantize_linear(x, given[0], EPS, weight, given[1])
                expected = reference.norm_quantize_linear(x, given[0], EPS, weight, given[1])
                assert_near(out, expected, FUSED_TOLERANCE)

    def test_quantize_linear_add(self, tokens, k, features, static, dtype, device, fused):
        x = draw(tokens, k, device=device).to(dtype)
        residual = draw(tokens, features, device=device).to(dtype)
        for weight in self.weights(features, k, static, device):
            stream = residual.clone()
            assert fused.quantize_linear_add(x, weight, stream) is stream
            expected = reference.quantize_linear_add(x, weight, residual.clone())
            assert_near(stream, expected, FUSED_TOLERANCE)

    def test_norm_quantize_swiglu_add(self, tokens, k, features, static, dtype, device, fused):
        residual, norm = draw(tokens, k, device=device).to(dtype), draw(k, device=device).to(dtype)
        both = self.weights(2 * features, k, static, device)
        for gate_up, down in zip(both, self.weights(k, features, static, device), strict=True):
            stream = residual.clone()
            assert fused.norm_quantize_swiglu_add(stream, norm, EPS, gate_up, down) is stream
            expected = reference.norm_quantize_swiglu_add(
                residual.clone(), norm, EPS, gate_up, down
            )
            assert_near(stream, expected, FUSED_TOLERANCE)


def grouped_weights(features: int, k: int, dtype, device) -> list[GroupedWeight]:
    wide = draw(features, k, device=device) / k**0.5
    schemes = [
        GroupedScheme(bits, group, symmetric, ordered)
        for bits, group, symmetric, ordered in (
            (4, 128, True, False),
            (4, 32, False, False),
            (4, None, False, False),
            (4, 64, True, True),
            (8, 32, True, False),
            (8, None, False, False),
        )
    ]
    weights = [quantize_weight(wide, scheme, dtype) for scheme in schemes]
    assert isinstance(weights[3], GroupedWeight)
    assert weights[3].order is not None
    weights[3].order.copy_(torch.randperm(k))
    return weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "features"), SHAPES)
class TestGrouped:
    def test_grouped_linear(self, tokens, k, features, dtype, device, products):
        x = draw(tokens, k, device=device).to(dtype)
        bias = draw(features, device=device).to(dtype)
        for weight in map(linear.arranged, grouped_weights(features, k, dtype, device)):
            for added in (None, bias):
                with poisoned_outputs():
                    out = products[1].grouped_linear(x, weight, added)
                expected = reference.grouped_linear(x, weight, added)
                assert_near(out, expected, TOLERANCE[dtype])

    def test_grouped_linear_add(self, tokens, k, features, dtype, device, products):
        x = draw(tokens, k, device=device).to(dtype)
        residual = draw(tokens, features, device=device).to(dtype)
        for weight in map(linear.arranged, grouped_weights(features, k, dtype, device)):
            stream = residual.clone()
            assert products[1].grouped_linear_add(x, weight, stream) is stream
            expected = reference.grouped_linear_add(x, weight, residual.clone())
            assert_near(stream, expected, 2 * TOLERANCE[dtype])


def test_output_is_written_to_out(device):
    """Only to its own rows."""
    x = draw(3, 128, device=device)
    four = grouped_weights(40, 128, x.dtype, device)[0]
    eight = scaled_weights(40, 128, device)[0]
    given = reference.quantize(x, eight.input_format)
    for ops in (reference, None):
        for weight, inputs in ((four, x), (eight, given)):
            name = "grouped_linear" if weight is four else "scaled_linear"
            module = ops or (grouped if weight is four else scaled)
            whole = torch.zeros(5, 40, device=device)
            out = whole[:3]
            assert getattr(module, name)(inputs, weight, out=out) is out
            tolerance = 1e-5 if weight is four else max(FP8_SUM, 1e-5)
            assert_near(out, getattr(reference, name)(inputs, weight), tolerance)
            assert not whole[3:].any()


@pytest.mark.parametrize("tokens", [1, 16, 40])
class TestARowDoesNotDependOnTheOthers:
    """A token has the same bits alone and among others, with any tiles."""

    def test_scaled(self, tokens, device):
        x = draw(100, 256, device=device)
        for weight in scaled_weights(70, 256, device):
            given = reference.quantize(x, weight.input_format)
            some = QuantizedInput(given.values[:tokens], given.scales[:tokens], given.dtype)
            if not CUDA and weight.values.dtype != torch.int8:
                continue  # numpy adds floating-point numbers in an order of its own
            whole = scaled.scaled_linear(given, weight)
            assert torch.equal(scaled.scaled_linear(some, weight), whole[:tokens])
            assert torch.equal(scaled.scaled_linear(given, weight, tiles=SMALL), whole)

    @pytest.mark.skipif(not CUDA, reason="in the interpreter numpy multiplies, in its own orders")
    def test_grouped(self, tokens, device):
        x = draw(100, 256, device=device).to(DTYPES[0])
        for weight in grouped_weights(70, 256, x.dtype, device):
            whole = grouped.grouped_linear(x, weight)
            assert torch.equal(grouped.grouped_linear(x[:tokens], weight), whole[:tokens])
            assert torch.equal(grouped.grouped_linear(x, weight, tiles=SMALL), whole)


@pytest.mark.parametrize("eight", EIGHT_BITS, ids=str)
def test_error_is_the_formats_own(eight, device):
    """Against float64: the products add no more error than the rounding of the device's sum."""
    wide = draw(64, 256, device=device) / 16
    weight = scaled_weight(wide, (1, 256), eight)
    x = reference.quantize(draw(8, 256, device=device), weight.input_format)
    exact = (x.values.double() * x.scales.double()) @ (
        weight.values.double() * weight.scales.double()
    ).t()
    tolerance = 1e-6 if eight == torch.int8 else FP8_SUM
    assert_near(scaled.scaled_linear(x, weight), exact.float(), tolerance)


def test_no_tokens(device):
    weight = scaled_weights(40, 128, device)[0]
    empty = quantize.quantize(torch.empty(0, 128, device=device), weight.input_format)
    assert scaled.scaled_linear(empty, weight).shape == (0, 40)
    four = grouped_weights(40, 128, torch.float32, device)[0]
    assert grouped.grouped_linear(torch.empty(0, 128, device=device), four).shape == (0, 40)
