"""The families with experts: rows of the table of families."""

from collections.abc import Mapping
from dataclasses import replace

from pagewire.worker.model.config.experts import ExpertKeys
from pagewire.worker.model.config.family import Activation, Family, WeightNames

# Experts have no other activation.
_SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

# DeepSeek V3's experts.
SIGMOID_EXPERTS = ExpertKeys(
    default_count=256,
    count_keys=("n_routed_experts", "num_local_experts"),
    intermediate_size_key="moe_intermediate_size",
    renormalize="norm_topk_prob",
    scoring="sigmoid",
    scaled=True,
    grouped="yes",
    shared_size_key="moe_intermediate_size",
    shared_count_key="n_shared_experts",
    dense_layers="first",
)
SHARED_EXPERTS = {
    "shared_gate_proj": "mlp.shared_experts.gate_proj",
    "shared_up_proj": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}

EXPERT_FAMILIES = (
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        activations=_SILU,
        experts=ExpertKeys(
            default_count=128,
            intermediate_size_key="moe_intermediate_size",
            renormalize="norm_topk_prob",
            dense_layers="step",
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        only={"use_sliding_window": False},
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        activations=_SILU,
        experts=ExpertKeys(
            default_count=60,
            count_keys=("num_experts",),
            intermediate_size_key="moe_intermediate_size",
            renormalize="norm_topk_prob",
            shared_size_key="shared_expert_intermediate_size",
            dense_layers="step",
        ),
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        only={"use_sliding_window": False},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        activations=_SILU,
        windowed_by="sliding_window",
        experts=ExpertKeys(default_count=8),
        names=WeightNames(
            parts={
                "router": "block_sparse_moe.gate",
                "expert_gate": "block_sparse_moe.experts.{expert}.w1",
                "expert_up": "block_sparse_moe.experts.{expert}.w3",
                "expert_down": "block_sparse_moe.experts.{expert}.w2",
            }
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        qk_norm="projection",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        activations=_SILU,
        experts=ExpertKeys(default_count=64, renormalize="norm_topk_prob"),
        defaults={
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
        only={"clip_qkv": None},
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        attention_sinks=True,
        activations=_SILU,
        windowed_by="sliding_window",
        layer_types=True,
        window_pattern=2,
        experts=ExpertKeys(default_count=128, gpt_oss=True),
        names=WeightNames(
            parts={
                "router": "mlp.router",
                "experts_gate_up": "mlp.experts.gate_up_proj",
                "experts_down": "mlp.experts.down_proj",
            }
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
        },
    ),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        activations=_SILU,
        embedding_multiplier_key="embedding_multiplier",
        residual_multiplier_key="residual_multiplier",
        attention_multiplier_key="attention_multiplier",
        logit_divisor_key="logits_scaling",
        experts=ExpertKeys(default_count=8, count_keys=("num_local_experts",)),
        names=WeightNames(
            parts={
                "router": "block_sparse_moe.router.layer",
                "experts_gate_up": "block_sparse_moe.input_linear",
                "experts_down": "block_sparse_moe.output_linear",
            }
        ),
        defaults={"max_position_embeddings": 2048, "num_experts_per_tok": 2},
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        qkv_bias="attention_bias",
        partial_rotary=True,
        activations=_SILU,
        experts=replace(SIGMOID_EXPERTS, default_count=128),
        names=WeightNames(
            parts=SHARED_EXPERTS,
            later_layers=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
)
