"""Random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.reference.quantized import dequantized
from support.models.plain_logits import prompt_logits
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


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_dummy_weights_know_quantized_configurations(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, "llama", initializer_range=0.02)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = CONFIGURATIONS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model_config(tmp_path)
    weights, again = (dummy_weights(model, torch.bfloat16, CPU, 3) for _ in range(2))
    for one, other in zip(weights.tensors(), again.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    layer = weights.layers[1]
    for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
        assert not isinstance(matrix, torch.Tensor)
        std = dequantized(matrix).std().item()
        assert std == pytest.approx(model.initializer_range, rel=0.1)
    tables = rope_tables(model, 32, CPU)
    decoder = Decoder(model, served_weights(model, weights), load_ops("torch"), tables)
    assert prompt_logits(decoder, list(range(20))).isfinite().all()


def test_dummy_norms_multiply_by_one(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma2")
    model = read_model_config(tmp_path)
    weights = served_weights(model, dummy_weights(model, torch.bfloat16, CPU, seed=3))
    layer = weights.layers[1]
    for norm in (weights.norm, layer.input_norm, layer.attended_norm, layer.mlp_norm):
        assert norm is not None
        assert torch.equal(norm, torch.ones(64, dtype=torch.float32))
    assert layer.post_norm_bias is None
