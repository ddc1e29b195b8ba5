"""Reads config.json, and lists the model families that the decoder can run.

A family is a row of a table: families differ in data for one decoder, not in code. A value has the
meaning and the default that it has in transformers 5; docs/decisions/own-configuration.md says why
transformers does not read it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagewire.json_files import line_of, read_json_object
from pagewire.worker.errors import SetupError
from pagewire.worker.model.pooling import causal_architecture
from pagewire.worker.model.stored_dtype import stored_dtype

RopeKind = Literal["default", "linear", "llama3"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table of families.

    `attention_bias` says which projections have a bias: none, `qkv` (query, key and value), or
    `config` (all four if `attention_bias` in config.json is true). `windowed_by` is the key of
    config.json that turns `sliding_window` on: None if the family has no sliding window,
    `sliding_window` if the presence of that key is enough. `defaults` are the family's values of
    keys that config.json does not have.
    """

    model_type: str
    architecture: str
    attention_bias: Literal["none", "qkv", "config"]
    qk_norm: bool
    windowed_by: Literal["sliding_window", "use_sliding_window"] | None
    defaults: Mapping[str, int]


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
        attention_bias="config",
        qk_norm=False,
        windowed_by=None,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        attention_bias="none",
        qk_norm=False,
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
        attention_bias="qkv",
        qk_norm=False,
        windowed_by="use_sliding_window",
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        attention_bias="config",
        qk_norm=True,
        windowed_by="use_sliding_window",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base `theta` and how the frequencies are scaled.

    `linear` and `llama3` use `factor`. Only `llama3` uses the three fields after it.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model, as the decoder needs it."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: str
    initializer_range: float

    @property
    def qkv_size(self) -> int:
        """Output features of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration in `folder/config.json`; SetupError names what is not supported.

    Without a data type there, it is that of the weights.
    """
    path = folder / "config.json"
    try:
        raw = read_json_object(path)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise SetupError(str(error)) from error
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        raw["dtype"] = stored_dtype(folder)
    try:
        return parse_model_config(raw)
    except SetupError as error:
        raise SetupError(_with_place(str(error), path, raw)) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SetupError(f"{path}: a value is of the wrong kind: {error}") from error


def _with_place(message: str, path: Path, raw: Mapping[str, Any]) -> str:
    """A message about config.json with the file's path, and the line of the key that it names."""
    words = re.findall(r"\w+", message)
    named = next((word for word in words if word in raw), None)
    line = None if named is None else line_of(path, named)
    place = str(path) if line is None else f"{path}, line {line}"
    return message.replace("config.json:", f"{place}:", 1)


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a decoded config.json; SetupError names what is not supported."""
    family = _family(raw)
    raw = {**family.defaults, **raw}
    _refuse_unsupported(raw)
    heads = _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise SetupError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    hidden = _positive(raw, "hidden_size")
    configured_bias = family.attention_bias == "config" and bool(raw.get("attention_bias"))
    return ModelConfig(
        family=family.model_type,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_positive(raw, "head_dim", default=hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        sliding_window=_sliding_window(raw, family),
        qkv_bias=configured_bias or family.attention_bias == "qkv",
        output_bias=configured_bias,
        qk_norm=family.qk_norm,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        initializer_range=float(raw.get("initializer_range", 0.02)),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    """The family that `architectures` names; without that key, the one of `model_type`."""
    architectures = raw.get("architectures") or []
    causal = [causal_architecture(name) for name in architectures]
    for family in FAMILIES:
        if family.architecture in causal:
            return family
        if not architectures and family.model_type == raw.get("model_type"):
            return family
    named = ", ".join(architectures) or f"model_type {raw.get('model_type')!r}"
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise SetupError(
        f"config.json: {named} is not a supported architecture; these are: {supported}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise SetupError(f"config.json: hidden_act {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("mlp_bias"):
        raise SetupError("config.json: mlp_bias is true; only models without it are supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise SetupError(
            f"config.json: weights quantized by {method!r} are not supported; "
            "use the model in bfloat16, float16 or float32"
        )


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise SetupError(
            f"config.json: RoPE has parameters of its own for {', '.join(nested)}; only models "
            "with the same for all layers are supported"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise SetupError(f"config.json: partial_rotary_factor {partial}; only 1 is supported")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=_rope_number(parameters, "factor"))
    if kind == "llama3":
        length = raw["max_position_embeddings"]
        parameters = {"original_max_position_embeddings": length, **parameters}
        return RopeConfig(
            "llama3",
            theta,
            factor=_rope_number(parameters, "factor"),
            low_freq_factor=_rope_number(parameters, "low_freq_factor"),
            high_freq_factor=_rope_number(parameters, "high_freq_factor"),
            original_max_position_embeddings=int(
                _rope_number(parameters, "original_max_position_embeddings")
            ),
        )
    raise SetupError(
        f"config.json: RoPE of type {kind!r} is not supported; these are: default, linear, llama3"
    )


def _rope_number(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise SetupError(f"config.json: the RoPE parameter {name} is {value!r}; it must be above 0")
    return float(value)


def _sliding_window(raw: Mapping[str, Any], family: Family) -> int | None:
    """The tokens that every layer sees, if one sees no more than these."""
    layers = raw.get("layer_types") or []
    unknown = set(layers) - {"full_attention", "sliding_attention"}
    if unknown:
        raise SetupError(
            f"config.json: layer_types has {', '.join(sorted(unknown))}; only full_attention and "
            "sliding_attention are supported"
        )
    if family.windowed_by is None or not raw.get(family.windowed_by):
        return None
    if family.windowed_by == "use_sliding_window" and not _has_windowed_layers(raw, layers):
        return None
    return _positive(raw, "sliding_window")


def _has_windowed_layers(raw: Mapping[str, Any], layers: Sequence[str]) -> bool:
    if layers:
        return "sliding_attention" in layers
    first = raw["max_window_layers"]  # the layers before have full attention
    if not isinstance(first, int):
        raise SetupError(f"config.json: max_window_layers is {first!r}; it must be an integer")
    return first < _positive(raw, "num_hidden_layers")


def _dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise SetupError(f"config.json: dtype {name!r}; supported are {', '.join(DTYPES)}")
    return str(name)


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise SetupError(f"config.json: {name} is {value!r}; it must be a positive integer")
    return value
