"""Quantized checkpoints of every kind yield the logits of plain torch."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import parse_model_config, read_model_config
from pagewire.worker.model.weights import empty_weights
from pagewire.worker.ops.contract.quantized import GroupedWeight, ScaledWeight
from support.models.expert_variants import EXPERT_VARIANTS
from support.models.latent_variants import LATENT_VARIANTS
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.quantized_models import (
    Format,
    awq,
    compressed_tensors,
    fp8_blocks,
    fp8_tensor,
    gptq,
    quantize_saved,
    save_quantized,
)
from support.models.tiny_models import (
    VARIANTS,
    VISION_VARIANTS,
    VOCAB,
    save_model,
    save_vision_model,
)

LENGTH = 40
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
TENSOR = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}
IN_128 = {"dynamic": True, "strategy": "group", "group_size": 128}
SIZES = {"hidden_size": 128, "intermediate_size": 256}
# Heads whose rows are not a multiple of 128, and inputs that do not fill a block.
# By variant: so that inputs fill groups of 32, and heads have the size that the variant needs.
MORE_SIZES = {
    "granite-4": {"shared_intermediate_size": 256},
    "phi3-longrope": {"num_attention_heads": 8},
}
DENSE = [name for name in VARIANTS if name not in EXPERT_VARIANTS | LATENT_VARIANTS]
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
    assert error(plain, meant) > 5e-3  # the weights do differ


@pytest.mark.parametrize("sizes", [SIZES, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("form", ALL_IN_EIGHT_BITS)
def test_quantized_weights_and_inputs(tmp_path: Path, form: str, sizes: dict[str, int]) -> None:
    """Rounding may differ for an input between two steps, so errors are larger."""
    meant = logits_of(save_quantized(tmp_path / "small", "llama", ALL_IN_EIGHT_BITS[form], **sizes))
    plain = logits_of(save_model(tmp_path / "plain", "llama", **sizes))
    found = error(our_logits(tmp_path / "small"), meant)
    assert found < 0.1 * error(plain, meant)


@pytest.mark.parametrize("asked", [True, False])
def test_stored_scales_of_a_cache_belong_to_its_scheme(tmp_path: Path, asked: bool) -> None:
    """The worker computes its own scales: it ignores the file's with the scheme, else refuses."""
    model = save_quantized(tmp_path, "llama", ALL_IN_EIGHT_BITS["fp8, channels"], **SIZES)
    path, config = (
        tmp_path / "model.safetensors",
        json.loads((tmp_path / "config.json").read_text()),
    )
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([0.02])
        for layer in range(config["num_hidden_layers"])
        for name in "kv"
    }
    save_file({**load_file(path), **scales}, path)
    if not asked:
        with pytest.raises(SetupError, match=r"self_attn\.k_scale has no place"):
            our_logits(tmp_path)
        return
    config["quantization_config"]["kv_cache_scheme"] = {**FP8, "strategy": "tensor"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert error(our_logits(tmp_path), logits_of(model)) < 0.05
    quantization = read_model_config(tmp_path).quantization
    assert quantization is not None
    assert quantization.fp8_kv


@pytest.mark.parametrize("form", ["packed, groups of 32", "gptq, ordered", "awq"])
@pytest.mark.parametrize("variant", [name for name in DENSE if name != "llama"])
def test_every_family(tmp_path: Path, variant: str, form: str) -> None:
    """With biases, norms of heads, kinds of RoPE, and tied heads, which stay plain."""
    sizes = {**SIZES, **MORE_SIZES.get(variant, {})}
    meant = logits_of(save_quantized(tmp_path, variant, WEIGHTS_ONLY[form], **sizes))
    assert error(our_logits(tmp_path), meant) < 1e-4


@pytest.mark.parametrize("form", ["fp8, channels", "int8, channels", "fp8 in blocks"])
@pytest.mark.parametrize(
    "variant",
    [
        *("phi3-longrope", "granite", "granite-4", "glm", "glm4", "olmo2", "exaone", "exaone4"),
        *("starcoder2", "ernie-biased", "cohere", "gemma", "gemma2", "gemma3", "llama-general"),
    ],
)
def test_every_form_of_layers_in_eight_bits(tmp_path: Path, variant: str, form: str) -> None:
    """Rows that RoPE needs in another order keep their scales, also those of blocks."""
    sizes = {**SIZES, **MORE_SIZES.get(variant, {})}
    model = save_quantized(tmp_path / "small", variant, ALL_IN_EIGHT_BITS[form], **sizes)
    plain = logits_of(save_model(tmp_path / "plain", variant, **sizes))
    meant = logits_of(model)
    assert error(our_logits(tmp_path / "small"), meant) < 0.1 * error(plain, meant)


def test_a_static_scale_of_a_heads_inputs_follows_the_multiplier_of_logits(tmp_path: Path) -> None:
    weights, inputs = {**FP8, "strategy": "tensor"}, {**TENSOR, "type": "float"}
    form = compressed_tensors(weights, inputs, "float-quantized", ignore=[])
    model = save_quantized(tmp_path / "small", "granite", form, skip=("none",), **SIZES)
    plain = logits_of(save_model(tmp_path / "plain", "granite", **SIZES))
    meant = logits_of(model)
    assert error(our_logits(tmp_path / "small"), meant) < 0.1 * error(plain, meant)


@pytest.mark.parametrize("model_type", VISION_VARIANTS)
def test_the_text_part_of_a_multi_modal_checkpoint(tmp_path: Path, model_type: str) -> None:
    form = packed(strategy="channel")
    form.config["ignore"] = [r"re:.*vision_tower.*", r"re:.*multi_modal_projector.*", "lm_head"]
    form.config["ignore"] += [r"re:.*language_model\.layers\.1\.mlp.*"]
    skip = ("lm_head", *(f"layers.1.{name}" for name in PROJECTIONS[4:]))
    model = save_vision_model(tmp_path, model_type)
    quantize_saved(tmp_path, model, form, skip, only="language_model")
    decoder = load_decoder(tmp_path, torch.float32, LENGTH)
    kinds = [isinstance(layer.down, Tensor) for layer in decoder.weights.layers]
    assert kinds == [False, True, False]
    assert error(our_logits(tmp_path), logits_of(model)) < 1e-4


@pytest.mark.parametrize("variant", LATENT_VARIANTS)
def test_latent_attention_is_refused(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = awq(32).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = parse_model_config(config | {"quantization_config": None}).family
    with pytest.raises(SetupError, match=f"'awq': layers with latent attention, as {family} has"):
        read_model_config(tmp_path)


def test_heads_that_need_padding_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", awq(32), hidden_size=128, head_dim=24)
    config = read_model_config(tmp_path)
    with pytest.raises(
        SetupError, match=r"head_dim is 24 in .* family llama; .* by awq .* 256; use --ops torch"
    ):
        config.with_heads_for_kernels()
    save_quantized(tmp_path, "llama", awq(32), hidden_size=128, head_dim=32)
    assert read_model_config(tmp_path).with_heads_for_kernels().served_head_dim == 32


def test_a_sample_has_a_layer_of_each_format(tmp_path: Path) -> None:
    form = packed(strategy="group", group_size=32)
    form.config["ignore"] = ["lm_head", "re:.*layers.[25]..*_proj"]
    save_model(tmp_path, "llama", num_hidden_layers=7)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = form.config
    model = parse_model_config(config)
    assert model.sample_layers() == (0, 2, 6)
    sample = empty_weights(model.with_layers((0, 2, 6)), torch.float32, torch.device("cpu"))
    kinds = [isinstance(layer.down, Tensor) for layer in sample.layers]
    assert kinds == [False, True, False]


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
