"""Reads the config.json of an EAGLE-3 head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.json_files import read_json_object
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, parse_model_config
from pagewire.worker.model.config.family import WeightNames
from pagewire.worker.model.config.stored_dtype import stored_dtype
from pagewire.worker.model.config.values import positive

# Early heads by the authors of EAGLE-3 have the last one.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
NUM_INPUTS = 3
IDS = "eagle_aux_hidden_state_layer_ids"
_VALUES = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "quantization_config": None,
    "layer_types": ["full_attention"],
    "pretraining_tp": 1,
    "logit_scale": 1.0,
    "is_causal": True,
}
# The supported values of `eagle_config`, which Model Optimizer writes.
_EAGLE_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
_READ = {
    *("architectures", "vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype"),
    *("target_hidden_size", "eagle_config", IDS),
}
# Fields that do not change the results. A head may compute positions that it was not trained with.
_IGNORED = {
    *("transformers_version", "use_cache", "initializer_range", "attention_dropout", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "_name_or_path"),
    *("tie_word_embeddings", "max_window_layers", "sliding_window", "target_model_type"),
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The layer, the output and the inputs of a head. Its vocabulary is that of drafts."""

    model: ModelConfig
    inputs: tuple[int, ...]  # layers of the target, whose inputs the head reads


def read_eagle_config(folder: Path, target: ModelConfig) -> EagleConfig:
    """The configuration in `folder/config.json` of a head for `target`.

    SetupError names a field that is not supported or does not fit. Unknown fields are refused
    unless they are null or false, because they may change the computation.
    """
    path = folder / "config.json"
    try:
        raw = read_json_object(path)
        raw.setdefault("dtype", raw.get("torch_dtype") or stored_dtype(folder))
        return parse_eagle_config(raw, target)
    except SetupError as error:
        raise SetupError(str(error).replace("config.json:", f"{path}:", 1)) from error
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


def parse_eagle_config(raw: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """The configuration in a decoded config.json; see `read_eagle_config`."""
    architectures = raw.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise SetupError(
            f"config.json: architectures {architectures} is not a supported EAGLE-3 head; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    for key, value in raw.items():
        if key not in _READ and key not in _IGNORED:
            _check_field(key, value, _VALUES)
    _check_equal(raw, "vocab_size", target.vocab_size)
    _check_equal(raw, "hidden_size", target.hidden_size)
    if raw.get("target_hidden_size") is not None:
        _check_equal(raw, "target_hidden_size", target.hidden_size)
    drafted = positive(raw, "draft_vocab_size", default=target.vocab_size)
    if drafted > target.vocab_size:
        raise SetupError(
            f"config.json: draft_vocab_size {drafted} is more than vocab_size {target.vocab_size}"
        )
    names = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    model = replace(
        parse_model_config({**raw, **names, "layer_types": None}),
        vocab_size=drafted,
        # `d2t` is read separately, and `t2d` follows from it.
        names=WeightNames(renamed=(("midlayer.", "model.layers.0."),), ignored=("d2t", "t2d")),
    )
    if model.activation != "silu":
        raise SetupError(f"config.json: hidden_act is {raw['hidden_act']!r}; it must be 'silu'")
    return EagleConfig(model, _inputs(raw, target.num_layers))


def _check_field(key: str, value: Any, wanted: Mapping[str, Any], of: str = "") -> None:
    """SetupError if a field may change a head's results; `of` names the field's object."""
    if value is None or (key in wanted and value == wanted[key]):
        return
    if key in wanted:
        raise SetupError(
            f"config.json: {of}{key} is {value!r}; an EAGLE-3 head must have {wanted[key]!r}"
        )
    if value is not False:
        raise SetupError(
            f"config.json: {of}{key} is {value!r}; this field of an EAGLE-3 head is not supported"
        )


def _check_equal(raw: Mapping[str, Any], key: str, wanted: int) -> None:
    if raw.get(key) != wanted:
        raise SetupError(
            f"config.json: {key} is {raw.get(key)!r}, and the model's is {wanted}; a head drafts "
            "for the model alone that it was trained with"
        )


def _inputs(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads; by default the EAGLE-3 authors' choice.

    Checkpoints number these states in two ways: by the layer that reads a state, or by the layer
    that wrote it. No head reads the input of layer 1. So a list that begins with 1 uses the second
    way.
    """
    eagle = raw.get("eagle_config") or {}
    for key, value in eagle.items():
        if key != IDS:
            _check_field(key, value, _EAGLE_VALUES, "eagle_config.")
    given = raw.get(IDS) or eagle.get(IDS) or None
    ids = [2, layers // 2, layers - 3] if given is None else list(given)
    if given is not None and ids[0] == 1:
        ids = [each + 1 for each in ids]
    if len(ids) != NUM_INPUTS or not all(0 <= each < layers for each in ids):
        raise SetupError(
            f"config.json: {IDS} {given} gives the layers {ids}, and the model has {layers}; a "
            f"head reads {NUM_INPUTS} of them"
        )
    return tuple(ids)
