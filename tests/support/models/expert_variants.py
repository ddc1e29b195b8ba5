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
