"""Random weights."""

from pathlib import Path

import pytest
import torch

from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from support.models.tiny_models import save_model

CPU = torch.device("cpu")


def test_dummy_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    model = read_model_config(tmp_path)
    first, again, other = (dummy_weights(model, torch.bfloat16, CPU, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), again.tensors(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)
    assert first.embedding.float().std().item() == pytest.approx(model.initializer_range, rel=0.05)
    assert torch.equal(first.norm, torch.ones(64, dtype=torch.bfloat16))


def test_dummy_norms_multiply_by_one(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma2")
    model = read_model_config(tmp_path)
    weights = served_weights(model, dummy_weights(model, torch.bfloat16, CPU, seed=3))
    layer = weights.layers[1]
    for norm in (weights.norm, layer.input_norm, layer.attended_norm, layer.mlp_norm):
        assert norm is not None
        assert torch.equal(norm, torch.ones(64, dtype=torch.float32))
    assert layer.post_norm_bias is None
