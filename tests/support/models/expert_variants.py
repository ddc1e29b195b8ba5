"""Tiny variants of the families with experts, as in `tiny_models.VARIANTS`."""

from typing import Any

EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (  # layers 0 and 1 are dense
        "qwen3_moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 72,
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 4, "eos_token_id": None}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "sliding_window": 24}),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "pad_token_id": None,
        },
    ),
    "glm4-moe-plain": (  # no norms of queries and keys, one group
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 72,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "pad_token_id": None,
        },
    ),
    "gpt-oss": (  # alternating windows, sinks, biases; 64 trained positions
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            "swiglu_limit": 1.5,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
}
