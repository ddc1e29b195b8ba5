"""Tiny random models in Hugging Face format, and their outputs in transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from support.models.expert_variants import EXPERT_VARIANTS
from support.models.latent_variants import LATENT_VARIANTS

VOCAB = 199

# More threads would make such small models slower.
torch.set_num_threads(1)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
# Phi-3 rotates a part of each head: 6 of 16 values, which are 3 frequencies.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.375,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA2 = {
    "pad_token_id": None,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GRANITE_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}

# By name: the model type, and differences from `_SIZES`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-general": ("llama", {"mlp_bias": True, "hidden_act": "gelu"}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-window": (
        "qwen2",
        {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "phi3": ("phi3", {"pad_token_id": None}),
    "phi3-longrope": (
        "phi3",
        {
            "pad_token_id": None,
            "head_dim": 16,
            "original_max_position_embeddings": 512,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "granite": ("granite", GRANITE_MULTIPLIERS),
    "granite-4": (
        "granitemoehybrid",
        {
            **GRANITE_MULTIPLIERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 112,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": None}),
    "glm": ("glm", {"head_dim": 32, "pad_token_id": None}),
    "glm4": ("glm4", {"head_dim": 32, "pad_token_id": None}),
    "olmo2": ("olmo2", {"pad_token_id": None}),
    "exaone": ("exaone", {"pad_token_id": None}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-window": ("exaone4", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "olmo3": ("olmo3", {"pad_token_id": None, "sliding_window": 24, "rope_parameters": BY_LAYER}),
    "starcoder2": ("starcoder2", {}),
    "seed-oss": ("seed_oss", {"head_dim": 16, "pad_token_id": None}),
    "ernie": ("ernie4_5", {"head_dim": 16}),
    "ernie-biased": ("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "cohere": ("cohere", {"pad_token_id": None, "logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        {"pad_token_id": None, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "gemma": ("gemma", {"head_dim": 32, "pad_token_id": None}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": (
        "gemma3_text",
        {
            "pad_token_id": None,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": BY_LAYER,
        },
    ),
    **EXPERT_VARIANTS,
    **LATENT_VARIANTS,
}

# Multi-modal model types, and the variant that is the language model of each.
VISION_VARIANTS = {"gemma3": "gemma3", "mistral3": "mistral-window"}

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large, so that the logits of random weights are far apart and differ by position.
    "initializer_range": 0.3,
}


def save_model(
    folder: Path, variant: str, *, seed: int = 0, shard: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Makes a model of `VARIANTS` in float32, saves it to `folder`, and returns it."""
    model_type, differences = VARIANTS[variant]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **differences, **overrides})
    return _save(AutoModelForCausalLM, config, folder, seed, shard)


def save_vision_model(folder: Path, model_type: str) -> PreTrainedModel:
    """Makes a multi-modal model of `VISION_VARIANTS`; see `save_model`."""
    text_type, differences = VARIANTS[VISION_VARIANTS[model_type]]
    text = {"model_type": text_type, **_SIZES, **differences}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    config.initializer_range = _SIZES["initializer_range"]
    return _save(AutoModelForImageTextToText, config, folder, 0, "5GB")


def _save(auto: Any, config: Any, folder: Path, seed: int, shard: str) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            # Norms start as ones and biases as zeros: a worker that ignores them would pass.
            if name.endswith(("bias", "sinks")) or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def served_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model in float32 in a worker, which folds two norms of each layer."""
    config = model.config
    folded = 2 * config.num_hidden_layers * config.hidden_size
    return 4 * (sum(p.numel() for p in model.parameters()) - folded)


def greedy_tokens(
    model: PreTrainedModel, prompt: list[int], count: int, **generation: object
) -> list[int]:
    """The tokens that transformers generates greedily after a prompt."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **generation,
        )
    return output[0, len(prompt) :].tolist()


def log_probabilities(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log probabilities in transformers at each position of an output, [output, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def beam_outputs(
    model: PreTrainedModel, prompt: list[int], count: int, stop_ids: tuple[int, ...], **options: Any
) -> list[tuple[list[int], float]]:
    """The final beams of transformers and their scores, best first.

    `options` are those of `generate`, including `num_beams`.
    """
    pad = VOCAB - 1
    assert pad not in stop_ids
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=pad,
            num_return_sequences=options["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    outputs = []
    for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [at for at, token in enumerate(tokens) if token in stop_ids]
        outputs.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return outputs
