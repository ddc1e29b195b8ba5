"""Quantized checkpoints of every kind give the logits that plain torch computes from them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pagewire.worker.ops.contract.quantized import GroupedWeight, ScaledWeight
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.quantized_models import (
    Format,
    awq,
    compressed_tensors,
    fp8_blocks,
    fp8_tensor,
    gptq,
    save_quantized,
)
from support.models.tiny_models import VARIANTS, VOCAB, save_model

LENGTH = 40
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
TENSOR = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}
IN_128 = {"dynamic": True, "strategy": "group", "group_size": 128}
SIZES = {"hidden_size": 128, "intermediate_size": 256}
# Heads of which the rows are no multiple of 128, and inputs that do not fill a block.
RAGGED = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 32}


def packed(**weights: Any) -> Format:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, **weights}
    return compressed_tensors(given, None, "pack-quantized")


WEIGHTS_ONLY = {
    "packed, groups of 32": packed(strategy="group", group_size=32),
    "packed, groups of 128": packed(strategy="group", group_size=128),
    "packed, channels": packed(strategy="channel"),
    "packed, zero points": packed(strategy="group", group_size=64, symmetric=False),
    "packed, channels with zero points": packed(strategy="channel", symmetric=False),
    "packed, eight bits": packed(strategy="group", group_size=32, num_bits=8),
    "gptq": gptq(4, 32, symmetric=True),
    "gptq, zero points": gptq(4, 64, symmetric=False),
    "gptq, one group": gptq(4, -1, symmetric=False),
    "gptq, eight bits": gptq(8, 32, symmetric=False),
    "gptq, ordered": gptq(4, 32, symmetric=False, order=True),
    "gptq, ordered and eight bits": gptq(8, 64, symmetric=True, order=True),
    "gptq, version 2": gptq(4, 32, symmetric=False, version=2),
    "awq": awq(32),
    "awq, groups of 128": awq(128),
}
ALL_IN_EIGHT_BITS = {
    "fp8, channels": compressed_tensors(
        {**FP8, "strategy": "channel"}, {**TOKEN, "type": "float"}, "float-quantized"
    ),
    "fp8, tensors": compressed_tensors(
        {**FP8, "strategy": "tensor"}, {**TOKEN, "type": "float"}, "float-quantized"
    ),
    "fp8, static": compressed_tensors(
        {**FP8, "strategy": "tensor"}, {**TENSOR, "type": "float"}, "float-quantized"
    ),
    "fp8, blocks": compressed_tensors(
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {**FP8, **IN_128},
        "float-quantized",
    ),
    "int8, channels": compressed_tensors(
        {**INT8, "strategy": "channel"}, {**TOKEN, "type": "int"}, "int-quantized"
    ),
    "int8, static": compressed_tensors(
        {**INT8, "strategy": "tensor"}, {**TENSOR, "type": "int"}, "int-quantized"
    ),
    "fp8 of one scale": fp8_tensor("dynamic"),
    "fp8 of one scale, static": fp8_tensor("static"),
    "fp8 in blocks": fp8_blocks(),
}


def prompts() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(3)]


def logits_of(model: PreTrainedModel) -> list[Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]


def our_logits(folder: Path) -> list[Tensor]:
    decoder = load_decoder(folder, torch.float32, LENGTH)
    return [prompt_logits(decoder, prompt) for prompt in prompts()]


@pytest.mark.parametrize("form", WEIGHTS_ONLY)
def test_quantized_weights(tmp_path: Path, form: str) -> None:
    meant = logits_of(save_quantized(tmp_path / "small", "llama", WEIGHTS_ONLY[form], **SIZES))
    plain = logits_of(save_model(tmp_path / "plain", "llama", **SIZES))
    assert error(our_logits(tmp_path / "small"), meant) < 1e-4
    assert error(plain, meant) > 5e-3  # the weights are indeed others


@pytest.mark.parametrize("sizes", [SIZES, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("form", ALL_IN_EIGHT_BITS)
def test_quantized_weights_and_inputs(tmp_path: Path, form: str, sizes: dict[str, int]) -> None:
    """Rounding may fall otherwise where an input lies between two steps, so errors are larger."""
    meant = logits_of(save_quantized(tmp_path / "small", "llama", ALL_IN_EIGHT_BITS[form], **sizes))
    plain = logits_of(save_model(tmp_path / "plain", "llama", **sizes))
    found = error(our_logits(tmp_path / "small"), meant)
    assert found < 0.1 * error(plain, meant)


@pytest.mark.parametrize("form", ["packed, groups of 32", "gptq, ordered", "awq"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "llama"])
def test_every_family(tmp_path: Path, variant: str, form: str) -> None:
    """With biases, norms of heads, kinds of RoPE, and tied heads, which stay plain."""
    meant = logits_of(save_quantized(tmp_path, variant, WEIGHTS_ONLY[form], **SIZES))
    assert error(our_logits(tmp_path), meant) < 1e-4


def test_layers_that_are_ignored_stay_plain(tmp_path: Path) -> None:
    form = packed(strategy="group", group_size=32)
    form.config["ignore"] = ["lm_head", "re:.*layers.1.*_proj", "model.layers.2.mlp.down_proj"]
    skip = ("lm_head", *(f"layers.1.{name}" for name in PROJECTIONS), "layers.2.mlp.down_proj")
    meant = logits_of(save_quantized(tmp_path, "qwen3", form, skip, **SIZES))
    layers = load_decoder(tmp_path, torch.float32, LENGTH).weights.layers
    kinds = [isinstance(layer.down, Tensor) for layer in layers]
    assert kinds == [False, True, True]
    assert [layer.post_norm is None for layer in layers] == [False, True, False]
    assert error(our_logits(tmp_path), meant) < 1e-4


PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def test_the_head_may_be_quantized(tmp_path: Path) -> None:
    form = packed(strategy="group", group_size=32)
    form.config["ignore"] = []
    meant = logits_of(save_quantized(tmp_path, "llama", form, skip=("none",), **SIZES))
    head = load_decoder(tmp_path, torch.float32, LENGTH).weights.head
    assert isinstance(head, GroupedWeight)
    assert error(our_logits(tmp_path), meant) < 1e-4


def test_groups_of_several_formats(tmp_path: Path) -> None:
    """The attention in FP8, the feed-forward layers in four bits."""
    attention, mlp = PROJECTIONS[:4], PROJECTIONS[4:]
    eight, four = ALL_IN_EIGHT_BITS["fp8, channels"], packed(strategy="group", group_size=32)
    save_quantized(tmp_path, "llama", eight, ("lm_head", *mlp), **SIZES)
    save_quantized(tmp_path / "four", "llama", four, ("lm_head", *attention), **SIZES)
    tensors = load_file(tmp_path / "four" / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if ".mlp." in name}
    others = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensor for name, tensor in others.items() if ".mlp." not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"] |= {"targets": ["re:.*self_attn.*"], "format": "float-quantized"}
    groups["group_1"] = {
        **four.config["config_groups"]["group_0"],
        "targets": ["re:.*mlp.*"],
        "format": "pack-quantized",
    }
    config["quantization_config"]["format"] = "mixed-precision"
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = load_decoder(tmp_path, torch.float32, LENGTH).weights.layers[0]
    assert isinstance(layer.qkv, ScaledWeight)
    assert isinstance(layer.output, ScaledWeight)
    assert isinstance(layer.gate_up, GroupedWeight)
    assert isinstance(layer.down, GroupedWeight)
    plain = logits_of(save_model(tmp_path / "plain", "llama", **SIZES))
    assert 1e-3 < error(our_logits(tmp_path), plain) < 1
