"""Errors of all kinds in the tensors of a quantized checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.weights import empty_weights
from support.models.plain_logits import load_decoder
from support.models.quantized_models import fp8_tensor, gptq, save_quantized

SIZES = {"hidden_size": 128, "intermediate_size": 256}
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
ORDERED = gptq(4, 32, symmetric=True, order=True)


def change(folder: Path, make: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    make(tensors)
    save_file(tensors, folder / "model.safetensors")


def expect(folder: Path, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        load_decoder(folder, torch.float32, 32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.pop(f"{Q}.scales"), rf"{Q}\.scales \[4, 128\] is missing"),
        (lambda t: t.pop(f"{Q}.g_idx"), rf"{Q}\.g_idx \[128\] is missing"),
        (
            lambda t: t.update({f"{Q}.qweight": torch.zeros(8, 8, dtype=torch.int32)}),
            rf"{Q}\.qweight has shape \[8, 8\], config.json needs \[16, 128\]",
        ),
        (
            lambda t: t.update({f"{Q}.scales": torch.zeros(4, 128, dtype=torch.int32)}),
            rf"{Q}\.scales is of type I32; supported are F32, F16, BF16",
        ),
        (lambda t: t[f"{Q}.qzeros"].zero_(), rf"{Q}: qzeros are not all 8"),
        (lambda t: t[f"{Q}.g_idx"].zero_(), rf"{Q}: g_idx does not put 32 inputs"),
        (lambda t: t.update({f"{K}.g_idx": t[f"{K}.g_idx"].flip(0)}), "g_idx differs"),
        (lambda t: t.update({f"{Q}.weight": torch.ones(2)}), rf"{Q}\.weight has no place"),
        (lambda t: t.update({f"{Q}.bias": torch.ones(128)}), rf"{Q}\.bias has no place"),
    ],
)
def test_tensors_are_checked(
    tmp_path: Path, make: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    save_quantized(tmp_path, "llama", ORDERED, **SIZES)
    change(tmp_path, make)
    expect(tmp_path, words)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """Older tools for GPTQ store one for every layer."""
    save_quantized(tmp_path, "llama", ORDERED, **SIZES)
    change(tmp_path, lambda tensors: tensors.update({f"{Q}.bias": torch.zeros(128)}))
    assert load_decoder(tmp_path, torch.float32, 32).weights.layers[1].qkv_bias is None


def test_plain_weights_under_a_quantized_configuration(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", fp8_tensor("dynamic"), skip=("proj", "lm_head"), **SIZES)
    expect(tmp_path, r"q_proj\.weight_scale \[1\] is missing")


def test_projections_of_one_matrix_have_one_format(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", fp8_tensor("dynamic"), **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignored_layers"] = [K]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model_config(tmp_path)
    with pytest.raises(SetupError, match=r"model\.layers\.1.*self_attn\.k_proj: None"):
        empty_weights(model, torch.float32, torch.device("cpu"))
