"""Tiny variants of the families with latent attention, as in `tiny_models.VARIANTS`."""

from typing import Any

_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}

LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_SIZES,
            "q_lora_rank": 28,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            **_SIZES,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_SIZES,
            "q_lora_rank": 28,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {
            **_SIZES,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {
            **_SIZES,
            "q_lora_rank": 28,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "youtu": ("youtu", {**_SIZES, "q_lora_rank": 28}),
}
