"""config.json has its meaning in transformers, in every form and with missing keys."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import FAMILIES, Family, ModelConfig, parse_model_config
from pagewire.worker.model.config.experts import ExpertKeys

SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHANGES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512},
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.5},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    {"rope_scaling": LLAMA3, "max_position_embeddings": 4096},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e5},
    {"rope_parameters": {"rope_theta": 2e5}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 512},
    {"partial_rotary_factor": 0.25},
    {"dtype": "bfloat16"},
    {"torch_dtype": "float16"},
    {"dtype": "bfloat16", "torch_dtype": "float16"},
    {"sliding_window": 32},
    {"sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 2},
    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
    {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 4},
]
EXPERT_CHANGES: list[dict[str, Any]] = [
    {"norm_topk_prob": True, "num_experts_per_tok": 3},
    {"num_experts": 12},
    {"num_local_experts": 12},
    {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48},
]


# Fields that a family needs to be supported.
NEEDED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"n_group": 2, "topk_group": 2},  # the experts of some changes form no 8 groups
    # Its default, which only dummy weights have, depends on the hidden size in transformers.
    "youtu": {"initializer_range": 0.02},
}


def of_transformers(folder: Path, raw: dict[str, Any], family: Family) -> dict[str, Any] | None:
    """The expected ModelConfig, by transformers' reading; None if it cannot read `raw`."""
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(raw))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (KeyError, ValueError, ZeroDivisionError, StrictDataclassClassValidationError):
        return None
    config = config.get_text_config()
    eps = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    rope = config.rope_parameters
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    return {
        "num_kv_heads": 1 if family.latent else config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "norm_eps": next(getattr(config, name) for name in eps if hasattr(config, name)),
        "max_position_embeddings": config.max_position_embeddings,
        "tied_head": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
        "windows": windows_of(config),
        "experts": of_experts(config, family.experts),
        "ropes": tuple(rope_of(rope.get(kind, rope)) for kind in types_of(config, layers)),
    }


def of_experts(config: Any, keys: ExpertKeys | None) -> tuple[Any, ...] | None:
    """Number, choices, intermediate size, renormalization and shared size of the experts."""
    if keys is None:
        return None
    shared = getattr(config, keys.shared_count_key) if keys.shared_count_key else 1
    return (
        getattr(config, keys.count_keys[0]),
        config.num_experts_per_tok,
        getattr(config, keys.intermediate_size_key),
        getattr(config, "norm_topk_prob", True),
        shared * getattr(config, keys.shared_size_key) if keys.shared_size_key else None,
    )


def types_of(config: Any, layers: int) -> list[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * layers


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of each layer, as the family's model in transformers uses its configuration."""
    layers, declared = config.num_hidden_layers, type(config).__annotations__
    window = config.sliding_window if "sliding_window" in declared else None
    if config.model_type.startswith("qwen") or config.model_type == "smollm3":
        window = window if config.use_sliding_window else None
    if "layer_types" not in declared:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def rope_of(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": rope["rope_type"],
        "theta": rope["rope_theta"],
        "factor": rope.get("factor", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 0),
        "partial": rope.get("partial_rotary_factor", 1.0),
    }


def ours(config: ModelConfig, names: dict[str, Any]) -> dict[str, Any]:
    found = {name: getattr(config, name) for name in names if name not in ("ropes", "experts")}
    values = names["ropes"][0]
    # A layer without RoPE may have any.
    ropes = (
        expected if rope is None else {name: getattr(rope, name) for name in values}
        for rope, expected in zip(config.ropes, names["ropes"], strict=True)
    )
    e = config.experts
    experts = e and (e.count, e.top_k, e.intermediate_size, e.renormalize, e.shared_size)
    return found | {"ropes": tuple(ropes), "experts": experts}


def is_refused(family: Family, changes: dict[str, Any]) -> bool:
    """Whether a value is refused here because transformers ignores it or it is not supported."""
    if any(changes.get(key, value) != value for key, value in family.only.items()):
        return True
    if family.local_rope is not None:
        scaling, parameters = (changes.get(f"rope_{name}") for name in ("scaling", "parameters"))
        if (
            changes.get("sliding_window", 1) is None
            or parameters
            or (scaling and "rope_type" not in scaling)
        ):
            return True
    if family.latent and "num_key_value_heads" in changes:
        return True
    return "partial_rotary_factor" in changes and not family.partial_rotary


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_values_and_defaults_are_those_of_transformers(tmp_path: Path, family: Family) -> None:
    named = {"model_type": family.model_type, "architectures": [family.architecture]}
    compared = 0
    for changes in [*CHANGES, *(EXPERT_CHANGES if family.experts else [])]:
        if is_refused(family, changes):
            continue
        sizes = SIZES | changes | NEEDED.get(family.model_type, {})
        raw = named | ({"text_config": sizes} if family.text_config else sizes)
        wanted = of_transformers(tmp_path, raw, family)
        if wanted is not None:
            assert ours(parse_model_config(raw), wanted) == wanted, changes
            compared += 1
    assert compared > len(CHANGES) / 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for full_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has linear"),
    ],
)
def test_what_differs_by_layer_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        parse_model_config({"model_type": "qwen3"} | SIZES | changes)
