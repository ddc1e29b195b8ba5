"""The families with latent attention: rows of the table of families."""

from collections.abc import Mapping
from dataclasses import replace

from pagewire.worker.model.config.expert_families import SHARED_EXPERTS, SIGMOID_EXPERTS
from pagewire.worker.model.config.experts import ExpertKeys
from pagewire.worker.model.config.family import Activation, Family, WeightNames

_NAMES = WeightNames(
    parts={
        "q_norm": "self_attn.q_a_layernorm",
        "k_norm": "self_attn.kv_a_layernorm",
        **SHARED_EXPERTS,
    },
    later_layers=True,
)
_SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}
_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    interleaved="rope_interleave",
    activations=_SILU,
    latent=True,
    experts=SIGMOID_EXPERTS,
    names=_NAMES,
    defaults={
        **_SIZES,
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    only={
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)

LATENT_FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        interleaved=True,
        activations=_SILU,
        latent=True,
        experts=ExpertKeys(
            default_count=64,
            count_keys=("n_routed_experts", "num_experts"),
            intermediate_size_key="moe_intermediate_size",
            renormalize=False,
            scaled=True,
            grouped="by_method",
            shared_size_key="moe_intermediate_size",
            shared_count_key="n_shared_experts",
            dense_layers="first",
        ),
        names=_NAMES,
        defaults={
            **_SIZES,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
        only={
            "attention_bias": False,
            "mlp_bias": False,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
    ),
    _DEEPSEEK_V3,
    replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        experts=replace(SIGMOID_EXPERTS, default_count=64, dense_layers="types"),
        defaults={
            **_SIZES,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        # `mlp_layer_types` says which layers are dense.
        only={**_DEEPSEEK_V3.only, "first_k_dense_replace": 1},
    ),
    Family(
        "youtu",
        "YoutuForCausalLM",
        interleaved="rope_interleave",
        activations=_SILU,
        latent=True,
        names=_NAMES,
        defaults={
            **_SIZES,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_interleave": True,
        },
        only={"attention_bias": False},
    ),
)
