"""Latent attention: its config.json, the content of the cache, and refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, parse_model_config, read_model_config
from pagewire.worker.model.config.latent import LatentConfig
from pagewire.worker.model.kv_cache import block_bytes, empty_cache
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.startup.loading import with_kv_cache, with_quantization
from support.models.latent_variants import LATENT_VARIANTS
from support.models.tiny_models import save_model

CPU = torch.device("cpu")
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": "bfloat16",
}
V2 = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}


def parsed(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(raw | changes)


def test_sizes_of_deepseek_v3() -> None:
    model = parsed(V3)
    assert model.latent == LatentConfig(1536, 512, 128, 64, 128)
    assert (model.num_heads, model.num_kv_heads, model.query_dim) == (128, 1, 192)
    assert model.interleaved
    assert model.with_heads_for_kernels() == model
    # 576 values for each token and layer; full heads would have 128 * (192 + 128).
    assert block_bytes(model, 16, torch.bfloat16) == 61 * 16 * 576 * 2


def test_yarn_multiplies_scores_by_the_square_of_its_factor() -> None:
    factor = 0.1 * 1.0 * math.log(40) + 1
    assert parsed(V3).attention_scale == pytest.approx(192**-0.5 * factor**2)
    assert parsed(V3).ropes[0].attention_factor == 1.0  # type: ignore[union-attr]
    plain = {key: value for key, value in V3["rope_scaling"].items() if "mscale" not in key}
    assert parsed(V3, rope_scaling=plain).attention_scale == 192**-0.5
    assert parsed(V3, rope_scaling=None).attention_scale == 192**-0.5


def test_experts_of_deepseek_v2() -> None:
    experts = parsed(V2).experts
    assert experts is not None
    assert (experts.scoring, experts.renormalize, experts.scale) == ("softmax", False, 2.5)
    assert (experts.groups, experts.top_groups, experts.shared_gate) == (8, 4, False)
    greedy = parsed(V2, topk_method="greedy").experts
    assert greedy is not None
    assert (greedy.groups, greedy.top_groups) == (1, 1)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (V3, {"num_key_value_heads": 8}, ["num_key_value_heads is 8", "num_attention_heads 128"]),
        (V3, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim is 63", "even"]),
        (V3, {"kv_lora_rank": None}, ["kv_lora_rank is None"]),
        (V3, {"q_lora_rank": 0}, ["q_lora_rank is 0"]),
        (V3, {"attention_bias": True}, ["attention_bias is True", "DeepseekV3ForCausalLM"]),
        (V3, {"topk_method": "greedy"}, ["topk_method is 'greedy'", "noaux_tc"]),
        (V3, {"scoring_func": "softmax"}, ["scoring_func is 'softmax'"]),
        (V3, {"moe_layer_freq": 2}, ["moe_layer_freq is 2"]),
        (V2, {"topk_method": "noaux_tc"}, ["topk_method is 'noaux_tc'", "group_limited_greedy"]),
        (V2, {"norm_topk_prob": True}, ["norm_topk_prob is True", "DeepseekV2ForCausalLM"]),
        (V2, {"n_group": 7}, ["n_group 7", "256 experts"]),
        (V2, {"mlp_bias": True}, ["mlp_bias is True"]),
        (
            V3,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            ["mscale_all_dim is 1.0", "'linear'", "yarn"],
        ),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            ["quant_method 'fp8'", "latent attention, as deepseek_v3 has", "bfloat16"],
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SetupError) as error:
        parsed(raw, **changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 1024}, "kv_lora_rank is 1024; .* powers of two from 16 to 512"),
        ({"kv_lora_rank": 384}, "kv_lora_rank is 384; .*--ops torch"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8; .* from 16 to 128"),
    ],
)
def test_sizes_that_the_kernels_do_not_read_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        parsed(V3, **changes).with_heads_for_kernels()


@pytest.mark.parametrize("types", [["dense"], ["dense", "moe"], ["sparse"] * 3])
def test_kinds_of_layers_that_cannot_be_are_refused(types: list[str]) -> None:
    flash = {"architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": 1}
    with pytest.raises(SetupError, match=r"mlp_layer_types is .* for each of 2 layers"):
        parsed(V3, **flash, num_hidden_layers=2, mlp_layer_types=types)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantization_at_loading_is_refused(name: Any) -> None:
    with pytest.raises(SetupError, match=f"--quantization {name}: layers with .* deepseek_v3 has"):
        with_quantization(parsed(V3), name)


def test_the_cache_holds_one_tensor_a_layer(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek-v2")
    model = read_model_config(tmp_path)
    cache = empty_cache(model, 6, 16, torch.float32, CPU)
    assert cache.nbytes == 6 * block_bytes(model, 16, torch.float32) == 6 * 3 * 16 * 48 * 4
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert keys.shape == (6, 1, 16, 48)
        assert keys.data_ptr() == values.data_ptr()
    cache.storage.copy_(torch.randn(cache.storage.shape))
    cache.keys[1][2, 0, 3, 40] = float("nan")
    cache.scrub(torch.tensor([2], dtype=torch.int32))
    assert cache.storage.isfinite().all()
    cache.copy(torch.tensor([2, 4]), torch.tensor([1, 5]))
    assert all(keys[[1, 5]].equal(keys[[2, 4]]) for keys in cache.keys)


@pytest.mark.parametrize("variant", LATENT_VARIANTS)
def test_dummy_weights_are_those_of_a_checkpoint(tmp_path: Path, variant: str) -> None:
    hf = save_model(tmp_path, variant)
    config = read_model_config(tmp_path)
    weights = dummy_weights(config, torch.float32, CPU, seed=3)
    parameters = sum(p.numel() for p in hf.parameters())
    corrections = sum(layer.correction is not None for layer in weights.layers)
    experts = 0 if config.experts is None else config.experts.count
    assert weights.nbytes == 4 * (parameters + corrections * experts)
    for layer in weights.layers:
        assert all(norm is None or norm.eq(1).all() for norm in layer.norms())
        assert isinstance(layer.kv_up, torch.Tensor)
        assert layer.kv_up.std() > 0.1
        assert (layer.query_up is None) == (config.latent.query_rank is None)  # type: ignore[union-attr]
    served = served_weights(config, weights)
    assert all(layer.input_norm is None for layer in served.layers)


def test_fp8_kv_is_refused_by_name() -> None:
    model = parse_model_config(V3)
    with pytest.raises(SetupError, match="--kv-cache-dtype fp8: deepseek_v3 has latent attention"):
        with_kv_cache(model, "fp8")
    assert not with_kv_cache(model, "auto").fp8_kv
