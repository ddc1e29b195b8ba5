"""Cases of `pagewire bench kernels` for experts: each runs and matches the reference."""

import copy

import pytest
import torch

from pagewire.bench.kernels.expert_cases import ExpertCaseMaker
from pagewire.bench.kernels.quantized_expert_cases import QuantizedExpertCases
from pagewire.bench.kernels.shapes import EXPERT_MODELS, ExpertShapes, Sizes
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.experts import ExpertRows, Routes
from support.kernels.comparison import CUDA, FP8_SUM, assert_near

SHAPES = ExpertShapes(hidden=48, intermediate=40, experts=6, top_k=2)
SIZES = Sizes(expert_tokens=(1, 9), rotated_bytes=0, compute_bound_tokens=9)
DEVICE = torch.device("cuda" if CUDA else "cpu")
CASES = dict(ExpertCaseMaker(SHAPES, SIZES, DEVICE, torch.float32).all())


@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_and_computes_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    assert len(case.inputs) == 2
    references = copy.deepcopy(case).calls(load_ops("torch"))
    for kernel, reference in zip(case.calls(load_ops("triton")), references, strict=True):
        for found, expected in zip(tensors(kernel()), tensors(reference()), strict=True):
            assert_near(found, expected, 1e-5)


# On a GPU sums in FP8 have fewer bits than in the reference. Before the second product a sum may
# round to another FP8 number, up to an eighth away: 0.3 % of the norm in these cases.
FP8_LAYER = 2**-7 if CUDA else 1e-4
QUANTIZED = ExpertCaseMaker(
    ExpertShapes(hidden=256, intermediate=128, experts=3, top_k=2), SIZES, DEVICE, torch.float32
)
QUANTIZED_CASES = dict(QuantizedExpertCases(QUANTIZED).all())


@pytest.mark.parametrize("name", QUANTIZED_CASES)
def test_a_case_of_quantized_experts(name: str) -> None:
    torch.manual_seed(0)
    case = QUANTIZED_CASES[name]()
    assert len(case.inputs) == 2
    tolerance = max(FP8_SUM, 1e-4) if "FP8" in name else 1e-4
    if "FP8" in name and case.op == "experts_add":
        tolerance = FP8_LAYER
    references = copy.deepcopy(case).calls(load_ops("torch"))
    for kernel, reference in zip(case.calls(load_ops("triton")), references, strict=True):
        assert_near(kernel(), reference(), tolerance)


def test_work_of_four_bits_is_a_quarter_and_scales() -> None:
    case = QUANTIZED_CASES["down of experts in MXFP4, tokens: 1"]()
    assert (case.work, case.unit) == (2 * 256 * (64 + 4), "TB/s")


def tensors(result: object) -> list[torch.Tensor]:
    """The tensors of a result that do not depend on tiles."""
    if isinstance(result, tuple):
        normed, routes = result
        assert isinstance(routes, Routes)
        return [normed, routes.experts, routes.weights]
    if isinstance(result, ExpertRows):
        return [result.pairs, result.rows, result.starts]
    assert isinstance(result, torch.Tensor)
    return [result]


def test_work_is_weights_in_small_batches_and_operations_in_large_ones() -> None:
    small, large = (CASES[f"down of experts, tokens: {tokens}"]() for tokens in (1, 9))
    assert (small.work, small.unit) == (2 * 48 * 40 * 4, "TB/s")
    assert (large.work, large.unit) == (2 * 18 * 48 * 40, "TFLOP/s")


def test_names_fit_the_table() -> None:
    for shapes in EXPERT_MODELS.values():
        names = [name for name, _ in ExpertCaseMaker(shapes, Sizes(), DEVICE).all()]
        assert len(set(names)) == 24
        assert max(map(len, names)) <= 58
        cases = QuantizedExpertCases(ExpertCaseMaker(shapes, Sizes(), DEVICE))
        names = [name for name, _ in cases.all()]
        assert len(set(names)) == (60 if shapes.intermediate % 128 == 0 else 48)
        assert max(map(len, names)) <= 58
