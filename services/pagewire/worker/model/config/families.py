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

# Multi-modal checkpoints whose language model is one of the families below.
_LANGUAGE_MODEL = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_NOT_TEXT = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)

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
    partial_rotary=True,
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
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    block="sandwich",
    activation_key="hidden_activation",
    windowed_by="sliding_window",
    layer_types=True,
    window_pattern=2,
    query_scalar_key="query_pre_attn_scalar",
    soft_caps=True,
    names=WeightNames({"post_norm": "pre_feedforward_layernorm"}),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm="head",
    local_rope=("rope_local_base_freq", 10_000.0),
    window_pattern=6,
    window_pattern_key="sliding_window_pattern",
    # Published checkpoints leave out whatever is as here.
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
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
        partial_rotary=True,
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
    replace(
        _OLMO2,
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        local_rope=(None, 500_000.0),
        windowed_by="sliding_window",
        layer_types=True,
        window_pattern=4,
        defaults={**_OLMO2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096},
    ),
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
    replace(
        _COHERE,
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        rotary_layers="windowed",
        windowed_by="sliding_window",
        layer_types=True,
        window_pattern=4,
        window_pattern_key="sliding_window_pattern",
        defaults={**_COHERE.defaults, "rope_theta": 10_000.0, "sliding_window": 4096},
    ),
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    replace(
        _GEMMA3,
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        text_config=True,
        names=replace(_GEMMA3.names, renamed=_LANGUAGE_MODEL, ignored=_NOT_TEXT),
    ),
    replace(
        _MISTRAL,
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        layer_types=False,
        text_config=True,
        names=WeightNames(renamed=_LANGUAGE_MODEL, ignored=_NOT_TEXT),
    ),
)
