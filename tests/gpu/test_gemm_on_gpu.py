"""GEMM with chosen cuBLASLt algorithms, on a GPU."""

import json

import pytest
import torch

from pagewire.worker.ops.cublas import gemm as gemms
from pagewire.worker.ops.cublas.cublaslt import Shape, algorithms, multiply, with_settings
from pagewire.worker.ops.cublas.gemm import worth_trying
from pagewire.worker.startup.tuning import invariant_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

# tokens, features, k
SHAPES = [(70, 1024, 2048), (144, 4096, 4096), (256, 6144, 1024), (97, 1000, 512), (2048, 512, 768)]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


def draw(tokens: int, features: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    shapes = (tokens, k), (features, k), (tokens, features)
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "features", "k"), SHAPES)
def test_every_algorithm_multiplies(
    tokens: int, features: int, k: int, dtype: torch.dtype, add: bool
) -> None:
    x, weight, held = draw(tokens, features, k, dtype)
    expected = x.double() @ weight.double().t() + (held.double() if add else 0)
    own = algorithms(Shape(tokens, features, k, dtype, add))
    others = algorithms(Shape(tokens + 64, features, k, dtype, add))
    found = worth_trying(Shape(tokens, features, k, dtype, add), others, x.device)
    assert 1 < len(own) <= len(found) == len({bytes(algorithm.chosen) for algorithm in found})
    for algorithm in found:
        out = held.clone() if add else torch.full_like(held, float("nan"))
        assert multiply(x, weight, out, algorithm) is out
        assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != gemms.SCHEDULED_CAPABILITY,
    reason="workers try tiles of one wave on Hopper only",
)
def test_tiles_of_one_wave_are_tried() -> None:
    shape = Shape(144, 4096, 4096, torch.bfloat16, add=True)
    named = {bytes(algorithm.chosen) for algorithm in algorithms(shape)}
    tried = worth_trying(shape, (), torch.device("cuda", 0))
    assert [a for a in tried if bytes(a.chosen) not in named]


def test_settings_that_the_library_refuses() -> None:
    named = algorithms(Shape(144, 4096, 4096, torch.bfloat16, add=True))[0]
    assert with_settings(named) is not None
    assert with_settings(named, tile=1) is None  # 8 by 8


def test_a_chosen_algorithm_is_used_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, held = draw(144, 4096, 4096, torch.bfloat16)
    calls = []

    def recording(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return multiply(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gemms, "multiply", recording)
    shapes = [Shape(144, 4096, 4096, torch.bfloat16, add) for add in (False, True)]
    chosen = {shape: algorithms(shape)[-1] for shape in shapes}
    monkeypatch.setattr(gemms, "_chosen", chosen)
    gemms.gemm(x, weight)
    gemms.gemm_add(x, weight, held.clone())
    graph, residual = torch.cuda.CUDAGraph(), held.clone()
    with torch.cuda.graph(graph):
        out = gemms.gemm(x, weight)
        gemms.gemm_add(x, weight, residual)
    assert len(calls) == 4
    residual.copy_(held)
    graph.replay()
    expected = x.double() @ weight.double().t()
    assert error(out, expected) < TOLERANCE[torch.bfloat16]
    assert error(residual, expected + held.double()) < TOLERANCE[torch.bfloat16]


def test_shapes_that_were_not_measured_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes, and matrices with another alignment than the measured ones."""
    x, weight, _ = draw(144, 4096, 4096, torch.bfloat16)
    shape = Shape(144, 4096, 4096, torch.bfloat16, add=False)
    monkeypatch.setattr(gemms, "_chosen", {shape: algorithms(shape)[-1]})
    monkeypatch.setattr(gemms, "multiply", None)
    assert torch.equal(gemms.gemm(x[:80], weight), torch.mm(x[:80], weight.t()))
    shifted = torch.empty(144 * 4096 + 8, device="cuda", dtype=torch.bfloat16)[8:].view(144, 4096)
    shifted.copy_(x)
    assert torch.equal(gemms.gemm(shifted, weight), torch.mm(shifted, weight.t()))
    assert not algorithms(Shape(144, 4096, 4096, torch.float32, add=False))


def test_the_fastest_algorithm_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [draw(1, 4096, 4096, torch.bfloat16)[1] for _ in range(4)]
    monkeypatch.setattr(gemms, "_chosen", {})
    changed = gemms.choose_algorithms(weights, [96, 160, 224], True)
    print(f"{changed} of 3 use another algorithm than torch")
    assert changed == len(gemms._chosen)
    assert {shape.tokens for shape in gemms._chosen} <= {96, 160, 224}


@pytest.mark.parametrize("add", [False, True])
def test_algorithms_of_an_earlier_start_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, add: bool
) -> None:
    sizes = [72, 160, 224, 1536]  # some have tiles that the heuristic does not list
    x, weight, held = draw(sizes[-1], 4096, 14336, torch.bfloat16)
    monkeypatch.setattr(gemms, "_chosen", {})
    monkeypatch.setattr(gemms, "MARGIN", 0.0)  # one is chosen for each size
    gemms.choose_algorithms([weight], sizes, add)

    def results() -> list[torch.Tensor]:
        rows = [(x[:tokens], held[:tokens].clone()) for tokens in sizes]
        assert all(gemms.is_chosen(given, weight, out, add) for given, out in rows)
        run = gemms.gemm_add if add else gemms.gemm
        return [run(given, weight, out) for given, out in rows]

    expected = results()
    kept = json.loads(json.dumps(gemms.choices(weight.device)))
    monkeypatch.setattr(gemms, "_chosen", {})
    assert gemms.use_choices(kept, weight.device)
    assert all(torch.equal(*pair) for pair in zip(results(), expected, strict=True))
    monkeypatch.setattr(gemms, "_chosen", {})
    kept["algorithms"][0][-1] = "ff" * 64
    assert not gemms.use_choices(kept, weight.device)
    assert not gemms._chosen


# Those of Qwen3-0.6B's and Llama-3.1-8B's layers where cuBLAS's first choice splits k, and a head.
@pytest.mark.parametrize(("features", "k"), [(1024, 3072), (4096, 14336), (151936, 1024)])
@pytest.mark.parametrize("add", [False, True])
def test_every_row_has_the_bits_of_the_kernels_for_batch_invariance(
    monkeypatch: pytest.MonkeyPatch, add: bool, features: int, k: int
) -> None:
    sizes = [72, 256, 512, 1536]
    x, weight, held = draw(sizes[-1], features, k, torch.bfloat16)
    monkeypatch.setattr(gemms, "_chosen", {})
    gemms.choose_algorithms([weight], sizes, add, invariant_order(add))
    expected = invariant_order(add)(x, weight, held.clone())
    for tokens in sizes:
        out = held[:tokens].clone()
        if not gemms.is_chosen(x[:tokens], weight, out, add):
            continue  # the worker computes this size with its own kernel
        out = gemms.gemm_add(x[:tokens], weight, out) if add else gemms.gemm(x[:tokens], weight)
        assert torch.equal(out, expected[:tokens]), tokens
    assert gemms._chosen, "cuBLAS has the order for some sizes"


def test_a_gemm_that_splits_k_does_not_have_the_reference_order() -> None:
    shape = Shape(64, 1024, 3072, torch.bfloat16, add=False)
    weight = draw(1, shape.features, shape.k, shape.dtype)[1]
    order = gemms.ReferenceOrder(shape, weight, invariant_order(add=False))
    half = shape.k // 2

    def split(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        parts = [x[:, :half].float() @ weight[:, :half].float().t()]
        parts.append(x[:, half:].float() @ weight[:, half:].float().t())
        return out.copy_(parts[0] + parts[1])

    assert order.holds(invariant_order(add=False))
    assert not order.holds(split)
