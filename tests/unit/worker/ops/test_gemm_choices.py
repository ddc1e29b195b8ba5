"""Algorithms of GEMMs that one process has chosen are used by another."""

import json
from typing import Any

import pytest
import torch

from pagewire.worker.ops.cublas import gemm
from pagewire.worker.ops.cublas.cublaslt import Algorithm, Shape, _Algorithm

GPU = torch.device("cuda", 0)
SHAPES = [
    Shape(8, 4096, 1024, torch.bfloat16, add=False),
    Shape(72, 1024, 4096, torch.float16, add=True),
]


def algorithm(number: int) -> Algorithm:
    nothing: Any = None
    return Algorithm(_Algorithm((number,) * 8), nothing, nothing, nothing, nothing, nothing)


def supported(_: Shape, chosen: bytes) -> Algorithm | None:
    return algorithm(int.from_bytes(chosen[:8], "little"))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The choices of another process, on a GPU of the same kind."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(gemm, "library_version", lambda: 130100)
    monkeypatch.setattr(gemm, "algorithm_of", supported)
    chosen = {shape: algorithm(number) for number, shape in enumerate(SHAPES, 7)}
    monkeypatch.setattr(gemm, "_chosen", chosen)
    kept: dict[str, Any] = json.loads(json.dumps(gemm.choices(GPU)))
    monkeypatch.setattr(gemm, "_chosen", {})
    return kept


def test_they_are_the_same(kept: dict[str, Any]) -> None:
    assert gemm.use_choices(kept, GPU)
    numbers = {shape: list(found.chosen.data) for shape, found in gemm._chosen.items()}
    assert numbers == {SHAPES[0]: [7] * 8, SHAPES[1]: [8] * 8}


@pytest.mark.parametrize(
    "here",
    [
        (torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3"),
        (gemm, "library_version", lambda: 130200),
        (gemm, "algorithm_of", lambda shape, _: None if shape.add else algorithm(1)),
    ],
    ids=["another GPU", "another library", "one is not supported"],
)
def test_none_is_used_here(
    kept: dict[str, Any], here: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*here)
    assert not gemm.use_choices(kept, GPU)
    assert gemm._chosen == {}
