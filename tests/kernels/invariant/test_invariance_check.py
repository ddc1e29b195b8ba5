"""At its start a worker detects kernels with several orders of addition on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.weights import Weights, dummy_weights
from pagewire.worker.ops.triton.invariant import linear
from pagewire.worker.startup import invariance
from pagewire.worker.startup.invariance import check_invariance
from support.kernels.any_threads import one_accumulator
from support.kernels.comparison import CUDA, DTYPES
from support.models.tiny_models import save_model

Model = tuple[ModelConfig, Weights]
DTYPE = DTYPES[0]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with nullcontext() if CUDA else one_accumulator():
        yield


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Model:
    """A tiny model; the interpreter compares fewer tokens and positions."""
    save_model(tmp_path, "qwen3", num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    if not CUDA:
        monkeypatch.setattr(invariance, "_TOKENS", (1, 4, 8, 40))
        monkeypatch.setattr(invariance, "_LENGTH", 70)
        monkeypatch.setattr(invariance, "_POSITIONS", (0, 63, 64, 69))
    config = read_model_config(tmp_path)
    return config, dummy_weights(config, DTYPE, device, seed=1)


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_kernels_with_one_order_pass(model: Model, fp8_kv: bool) -> None:
    config, weights = model
    check_invariance(replace(config, fp8_kv=fp8_kv), weights, block_size=16, dtype=DTYPE)


def test_a_gemm_with_another_order_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear.linear

    def other_order(x: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        out = multiply(x, *arguments, **options)
        return out.nextafter(torch.zeros_like(out)) if len(x) == 4 else out

    monkeypatch.setattr(linear, "linear", other_order)
    with pytest.raises(SetupError, match="the qkv projection of 4 tokens adds in another order"):
        check_invariance(*model, block_size=16, dtype=DTYPE)


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_attention_with_another_order_is_named(
    model: Model, monkeypatch: pytest.MonkeyPatch, fp8_kv: bool
) -> None:
    attend = invariance.decode_attention

    def other_order(*arguments: object, **options: object) -> torch.Tensor:
        assert (options["scales"] is not None) == fp8_kv
        out = attend(*arguments, **options)
        out[2] = out[2].nextafter(torch.zeros_like(out[2]))
        return out

    monkeypatch.setattr(invariance, "decode_attention", other_order)
    position = invariance._POSITIONS[2]
    config, weights = model
    with pytest.raises(SetupError, match=f"decode attention at position {position} adds"):
        check_invariance(replace(config, fp8_kv=fp8_kv), weights, block_size=16, dtype=DTYPE)
