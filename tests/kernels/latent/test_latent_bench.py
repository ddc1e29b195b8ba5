"""Cases of `pagewire bench kernels` for latent attention: each matches the reference."""

import copy

import pytest
import torch

from pagewire.bench.kernels.latent_cases import LatentCaseMaker
from pagewire.bench.kernels.shapes import LATENT_MODELS, LatentShapes, Sizes
from pagewire.worker.ops import load_ops
from support.kernels.comparison import CUDA, assert_near

SHAPES = LatentShapes(heads=4, plain=24, rank=32, rotated=16)
SIZES = Sizes(
    tokens=9,
    decode=((3, 20), (1, 40)),
    prefill=((2, 20),),
    sampled_rows=2,
    rotated_bytes=0,
    compute_bound_tokens=9,
)
DEVICE = torch.device("cuda" if CUDA else "cpu")
CASES = dict(LatentCaseMaker(SHAPES, SIZES, DEVICE, torch.float32).all())


@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_and_computes_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    assert len(case.inputs) == 2
    references = copy.deepcopy(case).calls(load_ops("torch"))
    for kernel, reference in zip(case.calls(load_ops("triton")), references, strict=True):
        assert_near(kernel(), reference(), 1e-5)


def test_work_is_what_is_read_or_computed() -> None:
    decode, prefill = (CASES[name]() for name in CASES if "attention, 3" in name or "2 x" in name)
    assert (decode.work, decode.unit) == ((3 * 20 * 48 + 2 * 3 * 4 * 32) * 4, "TB/s")
    assert (prefill.work, prefill.unit) == (2 * 2 * 210 * 4 * (32 + 16 + 32), "TFLOP/s")


def test_names_fit_the_table() -> None:
    for shapes in LATENT_MODELS.values():
        names = [name for name, _ in LatentCaseMaker(shapes, Sizes(), DEVICE).all()]
        assert len(set(names)) == 8
        assert max(map(len, names)) <= 58
