"""Layers with experts for few tokens: kernels that do not sort rows, against their references."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Scheme
from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routes, Routing
from pagewire.worker.ops.contract.quantized import LinearWeight
from pagewire.worker.ops.device import is_hopper
from pagewire.worker.ops.reference import experts as reference
from pagewire.worker.ops.triton import experts
from pagewire.worker.ops.triton.experts import layer
from pagewire.worker.ops.triton.experts.routing import choose
from pagewire.worker.ops.triton.streamed import experts as streamed
from support.kernels.comparison import (
    CUDA,
    DTYPES,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)

COUNT, TOP_K = 5, 3
HOPPER = CUDA and is_hopper(torch.device("cuda"))
CLAMP = ClampedSwiglu(1.702, 0.9)
# Inputs of down projections are rounded to FP8: another order of sums may yield the next number, at
# a relative distance of 2^-3.
FP8_INPUTS = 4e-2
SCHEMES: dict[str, Scheme | None] = {
    "plain": None,
    "fp8": Fp8Scheme(),
    "mxfp4": GroupedScheme(bits=4, group=32, symmetric=True, float4=True),
}
# Hidden and intermediate sizes. MXFP4 needs a multiple of 32.
SIZES = [(64, 32), (160, 96)]
if FULL_SIZE:
    SIZES += [(2048, 768), (2880, 2880)]


class Layer:
    """A random layer and the tokens that it reads."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        hidden: int,
        intermediate: int,
        biased: bool,
    ) -> None:
        torch.manual_seed(hidden + tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        def weight(rows: int, columns: int) -> LinearWeight:
            plain = (draw(COUNT, rows, columns) * columns**-0.5).to(dtype)
            scheme = SCHEMES[name]
            return plain if scheme is None else quantize_weight(plain.flatten(0, 1), scheme, dtype)

        self.x, self.residual = draw(tokens, hidden).to(dtype), draw(tokens, hidden).to(dtype)
        self.gate_up, self.down = weight(2 * intermediate, hidden), weight(hidden, intermediate)
        chosen = draw(tokens, COUNT).argsort(1)[:, :TOP_K].int().contiguous()
        self.routes = Routes(chosen, draw(tokens, TOP_K).softmax(1))
        self.biases: tuple[Tensor | None, ...] = (None, None, None)
        if biased:
            inner, outer = draw(COUNT, 2 * intermediate).to(dtype), draw(COUNT, hidden).to(dtype)
            self.biases = (inner, outer, CLAMP)

    def added(self, ops: object, token: slice = slice(None)) -> Tensor:
        """The residual stream after the layer."""
        routes = Routes(self.routes.experts[token], self.routes.weights[token])
        return ops.experts_add(
            self.x[token],
            routes,
            COUNT,
            self.gate_up,
            self.down,
            self.residual[token].clone(),
            *self.biases,
        )


@pytest.fixture
def unsorted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where rows are sorted."""

    def fail(*_: object) -> None:
        raise AssertionError("rows are sorted")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "sort_routes", fail)
        yield


@pytest.mark.usefixtures("unsorted")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_few_tokens(name, hidden, intermediate, tokens, dtype, biased, device):
    a = Layer(name, dtype, device, tokens, hidden, intermediate, biased)
    with poisoned_outputs():
        out = a.added(experts)
    expected = a.added(reference)
    tolerance = FP8_INPUTS if name == "fp8" else 6 * TOLERANCE[dtype]
    assert_near(out - a.residual, expected - a.residual, tolerance)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_has_the_same_bits_alone_and_beside_another(name, device):
    a = Layer(name, DTYPES[1], device, 2, 160, 96, biased=True)
    both = a.added(experts)
    for token in range(2):
        assert torch.equal(a.added(experts, slice(token, token + 1))[0], both[token])


@pytest.mark.parametrize("name", SCHEMES)
def test_more_tokens_are_sorted(name, device):
    a = Layer(name, DTYPES[0], device, 9, 160, 96, biased=True)
    expected = a.added(reference)
    assert_near(a.added(experts) - a.residual, expected - a.residual, FP8_INPUTS)


def test_a_shared_expert_is_added_behind_sorted_rows(device):
    a = Layer("plain", DTYPES[0], device, 1, 64, 32, biased=False)
    shared, gate = torch.randn_like(a.x), torch.randn_like(a.x[:, :1])
    rest = (a.x, a.routes, COUNT, a.gate_up, a.down)
    out = experts.experts_add(*rest, a.residual.clone(), None, None, None, shared, gate)
    expected = reference.experts_add(*rest, a.residual.clone(), None, None, None, shared, gate)
    assert_near(out, expected, 2 * TOLERANCE[DTYPES[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_route(biased, tokens, dtype, device):
    torch.manual_seed(tokens)
    x, norm = torch.randn(tokens, 72, device=device).to(dtype), torch.rand(72, device=device)
    router, bias = torch.randn(7, 72, device=device).to(dtype), torch.randn(7, device=device)
    given = (x, norm.to(dtype), 1e-5, router, Routing(7, 3), None, bias.to(dtype))
    if not biased:
        given = given[:-1]
    with poisoned_outputs():
        normed, routes = experts.norm_route(*given)
    expected_normed, expected = reference.norm_route(*given)
    assert_near(normed, expected_normed, TOLERANCE[dtype])
    if not CUDA:  # a norm that is rounded differently may change a choice
        assert routes.experts.tolist() == expected.experts.tolist()
    found, wanted = (r.weights.sort(1).values for r in (routes, expected))
    assert_near(found, wanted, TOLERANCE[dtype])


def test_equal_logits_signs_of_zero_and_nan(device):
    rows = [
        [0.0, -0.0, 0.0, -1.0, 2.0, 2.0],
        [float("nan"), 1, -1, float("-inf"), -3, float("nan")],
    ]
    logits = torch.tensor([*rows, [float("nan")] * 6], device=device)
    found = choose(logits, Routing(6, 4))
    assert found.experts.tolist() == [[4, 5, 0, 1], [1, 2, 4, 0], [0, 1, 2, 3]]
    assert found.weights[2].isnan().all()


@pytest.mark.skipif(not HOPPER, reason="the streamed kernels need a Hopper GPU")
def test_one_fp8_token_is_streamed(device, monkeypatch):
    count, hidden, inner = 16, 2048, 768
    torch.manual_seed(3)
    shapes = (count * 2 * inner, hidden), (count * hidden, inner)
    weights = [
        quantize_weight(
            (torch.randn(shape, device=device) * shape[1] ** -0.5).bfloat16(),
            Fp8Scheme(),
            torch.bfloat16,
        )
        for shape in shapes
    ]
    for seed in range(5):
        torch.manual_seed(seed)
        x, residual = (torch.randn(1, hidden, device=device).bfloat16() for _ in range(2))
        chosen = torch.randn(1, count, device=device).argsort(1)[:, :8].int().contiguous()
        routes = Routes(chosen, torch.randn(1, 8, device=device).softmax(1))
        assert streamed.is_supported(x, 8, count, *weights)
        with poisoned_outputs():
            found = experts.experts_add(x, routes, count, *weights, residual.clone())
        with monkeypatch.context() as patched:
            patched.setattr(streamed, "is_supported", lambda *_: False)
            expected = experts.experts_add(x, routes, count, *weights, residual.clone())
        assert_near(found - residual, expected - residual, FP8_INPUTS)


def test_without_tokens_nothing_is_added(device):
    a = Layer("plain", DTYPES[0], device, 1, 64, 32, biased=False)
    assert a.added(experts, slice(0)).shape == (0, 64)
