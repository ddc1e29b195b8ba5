"""Tiny checkpoints with quantized experts, and the equivalent plain model in transformers."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.models.quantized_models import Format, Stored
from support.models.tiny_models import save_model

QUANTIZED = (
    r".*(self_attn\.\w_proj|experts\.\d+\.\w+|shared_experts?\.\w+_proj|mlp\.\w+_proj)\.weight"
)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_quantized_experts(
    folder: Path, variant: str, form: Format, **overrides: Any
) -> PreTrainedModel:
    """Saves a model with linear layers quantized, except routers, shared experts' gates and head.

    Returns the model with the dequantized weights. `rounded_inputs` rounds its inputs.
    """
    save_model(folder, variant, **overrides)
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if re.fullmatch(QUANTIZED, name) is None:
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = form.store(tensor)
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    assert any("experts" in name for name in stored.keys() - meant.keys())
    return _written(folder, stored, meant, form.config)


@contextmanager
def rounded_inputs(model: PreTrainedModel, form: Format) -> Iterator[None]:
    """Inside, inputs of the quantized layers are quantized and dequantized."""
    plain = ("mlp.gate.weight", "shared_expert_gate.weight", "lm_head.weight")
    kept = {p.data_ptr() for name, p in model.named_parameters() if name.endswith(plain)}
    linear = functional.linear

    def quantized(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x if weight.data_ptr() in kept else form.inputs(x), weight, bias)

    with mock.patch.object(functional, "linear", quantized):
        yield


def save_mxfp4(folder: Path, **overrides: Any) -> PreTrainedModel:
    """Saves a gpt-oss with experts in four bits; returns the model with dequantized weights."""
    save_model(folder, "gpt-oss", **overrides)
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = tensor
            continue
        blocks, scales = _mxfp4(tensor.transpose(1, 2).numpy())  # [experts, out, in]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        error = (meant[name] - tensor).norm() / tensor.norm()
        assert 0.02 < error < 0.2
    return _written(folder, stored, meant, MXFP4)


def _mxfp4(weight: np.ndarray) -> tuple[Tensor, Tensor]:
    """Blocks `[experts, out, groups, 16]` and scales `[experts, out, groups]`, uint8."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - numbers).argmin(-1)
    bits = (nearest + np.where(scaled < 0, 8, 0)).astype(np.uint8)
    blocks = bits[..., ::2] | bits[..., 1::2] << 4
    return torch.from_numpy(blocks), torch.from_numpy((exponents + 127).astype(np.uint8))


def _written(
    folder: Path, stored: Stored, meant: Stored, config: dict[str, Any]
) -> PreTrainedModel:
    plain = folder / "plain"
    plain.mkdir()
    shutil.copy(folder / "config.json", plain)
    save_file(
        {name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors"
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return model
