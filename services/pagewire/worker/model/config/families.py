"""The table of model families that the decoder can run.

The families in this module have layers of Llama's form; others have modules of their own. The
values in `defaults` are those of transformers 5.
"""

from dataclasses import replace

from pagewire.worker.model.config.expert_families import EXPERT_FAMILIES
from pagewire.worker.model.config.family import Family, WeightNames
from pagewire.worker.model.config.latent_families import LATENT_FAMILIES
from pagewire.worker.model.config.multi_modal import LANGUAGE_MODEL, NOT_TEXT
from pagewire.worker.model.config.other_families import OTHER_FAMILIES

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
    layer_types=True,  # transformers then uses Ministral's classes
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
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        interleaved=True,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    replace(
        _LLAMA,
        model_type="exaone",
        architecture="ExaoneForCausalLM",
        written_as="LlamaForCausalLM",
        aliases={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        names=WeightNames(
            {
                "input_norm": "ln_1",
                "q": "attn.attention.q_proj",
                "k": "attn.attention.k_proj",
                "v": "attn.attention.v_proj",
                "output": "attn.attention.out_proj",
                "post_norm": "ln_2",
                "gate": "mlp.c_fc_0",
                "up": "mlp.c_fc_1",
                "down": "mlp.c_proj",
            },
            renamed=(
                ("transformer.wte.", "model.embed_tokens."),
                ("transformer.h.", "model.layers."),
                ("transformer.ln_f.", "model.norm."),
            ),
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    replace(
        _MISTRAL,
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        layer_types=False,
        text_config=True,
        names=WeightNames(renamed=LANGUAGE_MODEL, ignored=NOT_TEXT),
    ),
    *OTHER_FAMILIES,
    *EXPERT_FAMILIES,
    *LATENT_FAMILIES,
)
