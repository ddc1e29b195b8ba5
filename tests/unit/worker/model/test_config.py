"""Reading config.json: families, RoPE forms, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import RopeConfig, parse_model_config, read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


@pytest.mark.parametrize(
    ("changes", "qkv_bias", "output_bias", "qk_norm"),
    [
        ({}, False, False, None),
        ({"attention_bias": True}, True, True, None),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, False, False, None),
        ({"architectures": ["Qwen2ForCausalLM"]}, True, False, None),
        ({"architectures": ["Qwen3ForCausalLM"]}, False, False, "head"),
        ({"architectures": None, "model_type": "qwen3"}, False, False, "head"),
    ],
)
def test_traits_of_each_family(
    changes: dict[str, Any], qkv_bias: bool, output_bias: bool, qk_norm: str | None
) -> None:
    model = parse_model_config(config(**changes))
    assert (model.qkv_bias, model.output_bias, model.qk_norm) == (qkv_bias, output_bias, qk_norm)


def test_a_family_may_have_other_keys() -> None:
    older = config(architectures=["ExaoneForCausalLM"], layer_norm_epsilon=0.5)
    older["num_layers"] = older.pop("num_hidden_layers")
    model = parse_model_config(older | {"activation_function": "gelu"})
    assert (model.num_layers, model.norm_eps, model.activation) == (2, 0.5, "gelu")


def test_defaults_follow_from_other_values() -> None:
    model = parse_model_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (model.num_kv_heads, model.head_dim, model.tied_head) == (4, 16, False)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig("default", 10_000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig("default", 5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig("linear", 5e5, 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
            RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
            RopeConfig("default", 7e5),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}},
            RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_old_and_new_forms_of_rope(changes: dict[str, Any], rope: RopeConfig) -> None:
    assert parse_model_config(config(**changes)).ropes == (rope, rope)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 32}, None),  # llama has none
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            32,
        ),
    ],
)
def test_sliding_window(changes: dict[str, Any], window: int | None) -> None:
    assert parse_model_config(config(**changes)).windows[-1] == window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3"]),
        ({"architectures": [], "model_type": "bert"}, ["bert", "MistralForCausalLM"]),
        ({"hidden_act": "relu6"}, ["hidden_act", "relu6", "silu", "gelu_pytorch_tanh"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["hqq", "gptq", "bfloat16"]),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4}}, ["mrope", "llama3", "longrope"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["short_factor", "None", "list"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
            ["short_factor", "1 values", "8"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "None"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "only 1"]),
        (
            {"architectures": ["GlmForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.2},
            ["partial_rotary_factor", "0.2", "head_dim 16"],
        ),
        (
            {"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 1.5},
            ["partial_rotary_factor", "1.5", "1 at most"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e4}},
            ["rope_parameters", "rope_theta", "Gemma3ForCausalLM", "sliding_attention"],
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_scaling": {"type": "linear"}},
            ["rope_scaling", "linear", "rope_type"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            ["attn_logit_softcapping", "50.0", "None", "Gemma3ForCausalLM"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": None},
            ["sliding_window", "None", "positive"],
        ),
        (
            {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
            ["use_qk_norm", "True", "False", "CohereForCausalLM"],
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 8},
            ["num_local_experts", "8", "0"],
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0},
            ["layer_types", "linear_attention"],
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            ["no_rope_layers", "[1]", "2 layers"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1},
            ["attn_logit_softcapping", "-1", "above 0"],
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": "x"},
            ["residual_multiplier", "'x'", "above 0"],
        ),
        (
            {"architectures": ["MinistralForCausalLM"], "layer_types": ["full_attention"]},
            ["layer_types", "1 values", "2 layers"],
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"]},
            ["text_config", "None", "Mistral3ForConditionalGeneration"],
        ),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small", "above 0"]),
        ({"torch_dtype": "float64"}, ["float64", "bfloat16"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": "all",
            },
            ["max_window_layers", "all"],
        ),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan", "above 0"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf", "above 0"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "above 0"]),
        ({"hidden_size": 10**30}, ["hidden_size", str(10**30), str(2**31 - 1)]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", str(10**9), "10000"]),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9},
            ["num_experts", str(10**9), "10000"],
        ),
        ({"initializer_range": "small"}, ["initializer_range", "'small'", "above 0"]),
        ({"initializer_range": -1}, ["initializer_range", "-1", "above 0"]),
        ({"attention_bias": "false"}, ["attention_bias", "'false'", "true or false"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", "'false'", "true or false"]),
        ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']", "gelu"]),
        ({"architectures": 5}, ["architectures", "5", "list of names"]),
        ({"architectures": [5]}, ["architectures", "[5]", "list of names"]),
        ({"layer_types": [1, 2]}, ["layer_types", "[1, 2]", "list of names"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'", "object"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "[1]", "object"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan", "above 1"]),
        ({"rope_theta": "10000"}, ["rope_theta", "'10000'", "above 1"]),
        ({"rope_theta": 0}, ["rope_theta", "0", "above 1"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": True}}, ["factor", "True"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": -1}},
            ["beta_fast", "-1", "above 0"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": "x"}},
            ["mscale", "'x'", "above 0"],
        ),
        (
            {"rope_scaling": LLAMA3_SCALING | {"rope_type": "llama3", "low_freq_factor": 4}},
            ["low_freq_factor", "4", "below high_freq_factor"],
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4},
                "original_max_position_embeddings": 1.5,
            },
            ["original_max_position_embeddings", "1.5", "integer from 2"],
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        parse_model_config(config(**changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-1])
    with pytest.raises(SetupError, match=r"config\.json cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([LLAMA]))
    with pytest.raises(SetupError, match=r"config\.json cannot be read: it is not a JSON object"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1' + "0" * 5000 + "}")
    with pytest.raises(SetupError, match=r"config\.json cannot be read: a number has too many"):
        read_model_config(tmp_path)


def test_sampled_layers_have_every_window_and_the_last_layer() -> None:
    gemma = config(architectures=["Gemma3ForCausalLM"], num_hidden_layers=8, sliding_window=32)
    model = parse_model_config(gemma)
    assert model.windows == (32, 32, 32, 32, 32, None, 32, 32)
    kept = model.sample_layers()
    assert kept == (0, 5, 7)
    part = model.with_layers(kept)
    assert part.windows == (32, None, 32)
    assert [rope.theta for rope in part.ropes if rope] == [1e4, 1e6, 1e4]
    assert part.num_layers == 3
    assert parse_model_config(config()).sample_layers() == (0, 1)
    assert parse_model_config(config(num_hidden_layers=1)).sample_layers() == (0,)
