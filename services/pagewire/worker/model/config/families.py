"""The table of model families that the decoder can run.

A value of `defaults` is the family's own in transformers 5.
"""

from dataclasses import replace

from pagewire.worker.model.config.family import ACTIVATIONS, Family, WeightNames

_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FUSED_GATE_UP = {"gate_up": "mlp.gate_up_proj"}

_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    defaults={"max_position_embeddings": 2048},
)
_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    windowed_by="sliding_window",
    layer_types=True,  # transformers then takes Ministral's classes
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
_GLM = Family(
    "glm",
    "GlmForCausalLM",
    qkv_bias="attention_bias",
    interleaved=True,
    names=WeightNames(_FUSED_GATE_UP),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
)
_GRANITE = replace(
    _LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    embedding_multiplier_key="embedding_multiplier",
    residual_multiplier_key="residual_multiplier",
    attention_multiplier_key="attention_multiplier",
    logit_divisor_key="logits_scaling",
)
_OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    block="post",
    qk_norm="projection",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
_COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    block="parallel",
    norm="layer",
    norm_eps_key="layer_norm_eps",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    interleaved=True,
    logit_multiplier_key="logit_scale",
    defaults={
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    only={"use_qk_norm": False},
)
_GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    norm="rms_plus_one",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    activations={**ACTIVATIONS, "gelu": "gelu_tanh"},  # an old name for it
    root_embedding=True,
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    only={"use_bidirectional_attention": False},
)

FAMILIES = (
    _LLAMA,
    _MISTRAL,
    replace(_MISTRAL, model_type="ministral", architecture="MinistralForCausalLM"),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        qkv_bias=True,
        windowed_by="use_sliding_window",
        layer_types=True,
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_by="use_sliding_window",
        layer_types=True,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        windowed_by="sliding_window",
        names=WeightNames({"qkv": "self_attn.qkv_proj", **_FUSED_GATE_UP}),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    _GRANITE,
    replace(
        _GRANITE,
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        mlp_bias=False,
        intermediate_size_key="shared_intermediate_size",
        rotary_layers="position_embedding_type",
        names=WeightNames(
            {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
        ),
        defaults={
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
            "layer_types": ["linear_attention"],
        },
        only={"num_local_experts": 0},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        rotary_layers="no_rope_layers",
        windowed_by="use_sliding_window",
        layer_types=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    _GLM,
    replace(
        _GLM,
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        block="sandwich",
        names=WeightNames(
            {
                "attended_norm": "post_self_attn_layernorm",
                "mlp_norm": "post_mlp_layernorm",
                **_FUSED_GATE_UP,
            }
        ),
    ),
    _OLMO2,
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        block="post",
        qk_norm="head",
        rotary_layers="windowed_if_any",
        windowed_by="sliding_window",
        layer_types=True,
        window_pattern=4,
        window_pattern_key="sliding_window_pattern",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        norm="layer",
        norm_bias=True,
        norm_eps_key="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        windowed_by="sliding_window",
        names=WeightNames({"up": "mlp.c_fc", "down": "mlp.c_proj"}),
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "initializer_range": 0.018042,
        },
    ),
    _COHERE,
    _GEMMA,
)
