"""Checkpoints with quantized experts yield the logits of transformers."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import parse_model_config, read_model_config
from pagewire.worker.model.quantization.config import online_quantization
from pagewire.worker.model.weights import Weights, dummy_weights, empty_weights
from pagewire.worker.ops.contract.quantized import GroupedWeight, ScaledWeight
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.quantized_experts import (
    MXFP4,
    rounded_inputs,
    save_mxfp4,
    save_quantized_experts,
)
from support.models.quantized_models import (
    Format,
    awq,
    compressed_tensors,
    fp8_blocks,
    fp8_tensor,
    gptq,
)
from support.models.tiny_models import VOCAB, save_model

PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
MOE = {**SIZES, "moe_intermediate_size": 64}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
ROUTERS = ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]
FORMS = {
    "awq": awq(32),
    "gptq": gptq(4, 32, symmetric=True),
    "gptq in eight bits": gptq(8, 64, symmetric=False),
    "packed": compressed_tensors(
        {**INT4, "strategy": "group", "group_size": 32}, None, "pack-quantized", ignore=ROUTERS
    ),
    "fp8": compressed_tensors(
        {**FP8, "strategy": "channel"}, TOKEN, "float-quantized", ignore=ROUTERS
    ),
    "fp8 of one scale": fp8_tensor("dynamic"),
    "fp8, static": fp8_tensor("static"),
    "fp8 in blocks": fp8_blocks(),
}
IN_EIGHT_BITS = ("fp8", "fp8 of one scale", "fp8, static", "fp8 in blocks")


def check(folder: Path, model: Any, form: Format | None = None) -> Weights:
    """Compare logits with those of transformers, and return the weights.

    An input in eight bits may be rounded differently if it lies between two steps.
    """
    rounded = nullcontext() if form is None else rounded_inputs(model, form)
    most = 1e-4 if form is None or form.config["quant_method"] in ("awq", "gptq") else 2e-2
    with torch.no_grad(), rounded:
        meant = model(torch.tensor([PROMPT])).logits[0]
    decoder = load_decoder(folder, torch.float32, 40)
    assert error([prompt_logits(decoder, PROMPT)], [meant]) < most
    return decoder.weights


@pytest.mark.parametrize("form", FORMS)
def test_qwen3_moe(tmp_path: Path, form: str) -> None:
    model = save_quantized_experts(tmp_path, "qwen3-moe", FORMS[form], **MOE)
    layer = check(tmp_path, model, FORMS[form]).layers[0]
    kind = ScaledWeight if form in IN_EIGHT_BITS else GroupedWeight
    assert isinstance(layer.gate_up, kind)
    assert isinstance(layer.down, kind)
    assert (layer.gate_up.shape, layer.down.shape) == ((7 * 128, 128), (7 * 128, 64))


@pytest.mark.parametrize("form", ["awq", "gptq in eight bits", "fp8 in blocks"])
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("qwen3-moe-mixed", {**SIZES, "moe_intermediate_size": 64}),
        ("qwen2-moe", {**MOE, "shared_expert_intermediate_size": 192}),
        ("mixtral", SIZES),
        ("olmoe", SIZES),
        ("glm4-moe", {**MOE, "head_dim": 32}),
    ],
)
def test_families(tmp_path: Path, variant: str, sizes: dict[str, Any], form: str) -> None:
    """With dense layers, shared experts, and experts whose rows do not fill blocks."""
    model = save_quantized_experts(tmp_path, variant, FORMS[form], **sizes)
    layer = check(tmp_path, model, FORMS[form]).layers[-1]
    if variant in ("qwen2-moe", "glm4-moe"):
        assert isinstance(layer.shared_down, ScaledWeight | GroupedWeight)


def test_mxfp4(tmp_path: Path) -> None:
    """160 and 96 inputs do not fill runs of 128."""
    model = save_mxfp4(tmp_path, hidden_size=160, intermediate_size=96, initializer_range=0.1)
    weights = check(tmp_path, model)
    for layer in weights.layers:
        assert isinstance(layer.gate_up, GroupedWeight)
        assert isinstance(layer.qkv, torch.Tensor)
        assert layer.gate_up.values.dtype == layer.gate_up.scales.dtype == torch.uint8
        assert layer.gate_up.values.shape == (6 * 192, 128)
        assert layer.gate_up.scales.shape == (6 * 192, 5)


def test_an_incomplete_mxfp4_checkpoint_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, intermediate_size=96)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"experts.down_proj.scales \[6, 64, 3\] is missing"):
        load_decoder(tmp_path, torch.float32, 40)
    tensors |= {f"{name}_scales": scales.float()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"down_proj_scales is of type F32; supported are U8"):
        load_decoder(tmp_path, torch.float32, 40)


def test_a_model_knows_whether_its_experts_are_quantized(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "four", intermediate_size=96)
    assert read_model_config(tmp_path / "four").experts_quantized
    form = FORMS["packed"].config
    only_attention = {**form, "ignore": [*ROUTERS, r"re:.*mlp\..*"]}
    save_model(tmp_path / "moe", "qwen3-moe", **MOE)
    raw = json.loads((tmp_path / "moe" / "config.json").read_text())
    for config, quantized in ((form, True), (only_attention, False), (None, False)):
        model = parse_model_config({**raw, "quantization_config": config})
        assert model.experts_quantized == quantized


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen2-moe", "mixtral", "glm4-moe"])
def test_experts_are_quantized_while_they_are_loaded(
    tmp_path: Path, variant: str, kind: str
) -> None:
    assert kind in ("fp8", "int8")
    save_model(tmp_path, variant, **{**SIZES, "initializer_range": 0.02})
    model = read_model_config(tmp_path)
    decoder = load_decoder(
        tmp_path, torch.float32, 40, replace(model, quantization=online_quantization(kind))
    )
    exact = prompt_logits(load_decoder(tmp_path, torch.float32, 40), PROMPT)
    assert 1e-4 < error([prompt_logits(decoder, PROMPT)], [exact]) < 0.15
    layer = decoder.weights.layers[-1]
    assert isinstance(layer.down, ScaledWeight)
    assert isinstance(layer.router, torch.Tensor)


@pytest.mark.parametrize("variant", ["gpt-oss", "granite-moe"])
def test_experts_in_one_tensor_are_refused(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = awq(32).config
    with pytest.raises(SetupError, match=r"'awq': experts that are one tensor in a checkpoint, as"):
        parse_model_config(config)
    with pytest.raises(SetupError, match=r"--quantization fp8: experts that are one tensor"):
        read_model_config(tmp_path).check_quantizable("--quantization fp8")


def test_mxfp4_of_other_families_and_ordered_groups_are_refused(tmp_path: Path) -> None:
    for form, message in (
        (MXFP4, "'mxfp4': experts in four bits are supported as gpt-oss has them, not as qwen3"),
        (
            gptq(4, 32, symmetric=True, order=True).config,
            r"'gptq': groups with inputs in any order",
        ),
    ):
        save_model(tmp_path, "qwen3-moe")
        config = json.loads((tmp_path / "config.json").read_text())
        with pytest.raises(SetupError, match=message):
            parse_model_config({**config, "quantization_config": form})
    for variant in ("llama", "qwen3"):
        save_model(tmp_path, variant)
        config = json.loads((tmp_path / "config.json").read_text())
        with pytest.raises(SetupError, match=f"as gpt-oss has them, not as {variant} has"):
            parse_model_config({**config, "quantization_config": MXFP4})


def test_unknown_fields_of_mxfp4_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt-oss")
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(SetupError, match=r"quantization_config.swizzled is True"):
        parse_model_config({**config, "quantization_config": {**MXFP4, "swizzled": True}})


def test_random_weights_of_quantized_configurations(tmp_path: Path) -> None:
    """The shapes of gpt-oss-20b and of Qwen3-30B-A3B in FP8, with fewer layers and experts."""
    for variant, config, sizes in (
        ("gpt-oss", MXFP4, {"hidden_size": 2880, "intermediate_size": 2880}),
        ("qwen3-moe", fp8_blocks().config, {"hidden_size": 2048, "moe_intermediate_size": 768}),
    ):
        raw = _raw(tmp_path, variant, num_hidden_layers=1, vocab_size=64, **sizes)
        model = parse_model_config({**raw, "quantization_config": config})
        weights = dummy_weights(model, torch.bfloat16, torch.device("cpu"), seed=0)
        layer = weights.layers[0]
        assert isinstance(layer.gate_up, GroupedWeight | ScaledWeight)
        four = variant == "gpt-oss"
        # A run of 128 columns needs 64 bytes; each 32 of them have a scale of one byte.
        bytes_of_row = 23 * 64 if four else sizes["hidden_size"]
        rows = 2 * model.experts.count * model.experts.intermediate_size
        assert layer.gate_up.values.nbytes == rows * bytes_of_row
        assert layer.gate_up.block == (128, 128) if not four else layer.gate_up.float4


# As published, without keys unrelated to the decoder.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
QWEN3_30B_FP8: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [
            "lm_head",
            *(
                f"model.layers.{i}.{name}"
                for i in range(48)
                for name in ("mlp.gate", "input_layernorm")
            ),
        ],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("raw", "least", "most"), [(GPT_OSS_20B, 13.7e9, 14.2e9), (QWEN3_30B_FP8, 31e9, 31.5e9)]
)
def test_models_as_they_are_published(raw: dict[str, Any], least: float, most: float) -> None:
    model = parse_model_config(raw)
    weights = empty_weights(model, torch.bfloat16, torch.device("meta"))
    assert least < weights.nbytes < most
    assert model.experts_quantized
    layer = weights.layers[-1]
    assert isinstance(layer.router, torch.Tensor)
    if model.family == "gpt_oss":
        assert model.windows == (128, None) * 12
        assert model.ropes[0] is not None
        assert not model.ropes[0].truncate
        assert layer.sinks is not None
        assert isinstance(layer.qkv, torch.Tensor)
    else:
        assert isinstance(layer.gate_up, ScaledWeight)
        assert layer.gate_up.block == (128, 128)
        assert isinstance(layer.qkv, ScaledWeight)


def _raw(folder: Path, variant: str, **sizes: Any) -> dict[str, Any]:
    save_model(folder, variant)
    return {**json.loads((folder / "config.json").read_text()), "layer_types": None, **sizes}
