"""Families whose layers are not of Llama's form: norms of other kinds or places, parallel blocks.

See `families` for the others.
"""

from dataclasses import replace

from pagewire.worker.model.config.family import ACTIVATIONS, Family, WeightNames
from pagewire.worker.model.config.multi_modal import LANGUAGE_MODEL, NOT_TEXT

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
    only={**_GEMMA2.only, "attn_logit_softcapping": None},  # transformers does not apply it
    window_pattern=6,
    window_pattern_key="sliding_window_pattern",
    # Published checkpoints leave out keys that have these values.
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

OTHER_FAMILIES = (
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
        names=replace(_GEMMA3.names, renamed=LANGUAGE_MODEL, ignored=NOT_TEXT),
    ),
)
