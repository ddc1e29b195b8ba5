"""The table of model families that the decoder can run."""

from pagewire.worker.model.config.family import Family

_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        windowed_by="sliding_window",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        qkv_bias=True,
        windowed_by="use_sliding_window",
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_by="use_sliding_window",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
)
