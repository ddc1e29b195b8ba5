"""Reads config.json.

A value has its meaning and its default of transformers 5. docs/decisions/own-configuration.md says
why transformers does not read it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.json_files import line_of, read_json_object
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.experts import read_experts
from pagewire.worker.model.config.families import FAMILIES
from pagewire.worker.model.config.family import Activation, Family
from pagewire.worker.model.config.latent import latent_scale, read_latent
from pagewire.worker.model.config.layer_kinds import read_layer_ropes, read_windows
from pagewire.worker.model.config.model_config import ModelConfig
from pagewire.worker.model.config.rope import RopeConfig
from pagewire.worker.model.config.stored_dtype import stored_dtype
from pagewire.worker.model.config.values import flag, names, number, positive
from pagewire.worker.model.quantization.config import parse_quantization

DTYPES = ("float32", "bfloat16", "float16")


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration in `folder/config.json`; SetupError names an unsupported value.

    If config.json has no data type, the weights determine it.
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
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise SetupError(f"{path}: a value is of the wrong kind: {error}") from error


def _with_place(message: str, path: Path, raw: Mapping[str, Any]) -> str:
    """A message about config.json with the file's path, and the line of the key that it names."""
    words = re.findall(r"\w+", message)
    named = next((word for word in words if word in raw), None)
    line = None if named is None else line_of(path, named)
    place = str(path) if line is None else f"{path}, line {line}"
    return message.replace("config.json:", f"{place}:", 1)


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a decoded config.json; SetupError names an unsupported value."""
    family = _family(raw)
    given = {family.aliases.get(key, key): value for key, value in _of_text(raw, family).items()}
    raw = {**family.defaults, **given}
    _refuse_unsupported(raw, family)
    heads = positive(raw, "num_attention_heads")
    latent = read_latent(raw, heads) if family.latent else None
    kv_heads = 1 if latent else positive(raw, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise SetupError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    hidden = positive(raw, "hidden_size")
    head_dim = latent.rotated_dim if latent else positive(raw, "head_dim", default=hidden // heads)
    windows = read_windows(raw, family)
    ropes = read_layer_ropes(raw, family, windows)
    _check_ropes(ropes, head_dim)
    model = ModelConfig(
        family=family.model_type,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, family.intermediate_size_key),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        served_head_dim=head_dim,
        max_position_embeddings=positive(raw, "max_position_embeddings"),
        block=family.block,
        norm=family.norm,
        norm_bias=family.norm_bias,
        norm_eps=number(raw, family.norm_eps_key, default=1e-6),
        qk_norm=family.qk_norm if flag(raw, family.qk_norm_key or True) else None,
        qkv_bias=flag(raw, family.qkv_bias),
        output_bias=flag(raw, family.output_bias),
        mlp_bias=flag(raw, family.mlp_bias),
        activation=_activation(raw, family),
        gated=family.gated,
        experts=read_experts(raw, family.experts),
        ropes=ropes,
        interleaved=flag(raw, family.interleaved),
        numbers=tuple(range(len(windows))),
        windows=windows,
        attention_scale=latent_scale(latent, ropes[0])
        if latent
        else _attention_scale(raw, family, head_dim),
        attention_soft_cap=_soft_cap(raw, family, "attn_logit_softcapping"),
        attention_sinks=family.attention_sinks,
        logit_soft_cap=_soft_cap(raw, family, "final_logit_softcapping"),
        embedding_multiplier=math.sqrt(hidden)
        if family.root_embedding
        else _multiplier(raw, family.embedding_multiplier_key),
        residual_multiplier=_multiplier(raw, family.residual_multiplier_key),
        logit_multiplier=_multiplier(raw, family.logit_multiplier_key)
        / _multiplier(raw, family.logit_divisor_key),
        tied_head=flag(raw, "tie_word_embeddings"),
        names=family.names,
        dtype=_dtype(raw),
        initializer_range=_initializer_range(raw),
        quantization=parse_quantization(raw),
        latent=latent,
    )
    if model.quantization is not None:
        method = model.quantization.method
        model.check_quantizable(f"config.json: quantization_config: quant_method {method!r}")
    return model


def _causal_architecture(name: str) -> str:
    """The architecture with a language model head whose decoder is that of `name`."""
    return re.sub(r"(ForSequenceClassification|Model)$", "ForCausalLM", name)


def _family(raw: Mapping[str, Any]) -> Family:
    """The family that `architectures` names; without that key, the one of `model_type`."""
    architectures = names(raw, "architectures")
    causal = [_causal_architecture(name) for name in architectures]
    for family in FAMILIES:
        if family.written_as in causal and family.model_type == raw.get("model_type"):
            return family
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


def _of_text(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The part of config.json about the language model."""
    if not family.text_config:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise SetupError(
            f"config.json: text_config is {text!r}; for {family.architecture} it must describe the "
            "language model"
        )
    outer = {key: value for key, value in raw.items() if value is not None}
    # The head belongs to the outer model.
    own = (key for key in outer if text.get(key) is None or key == "tie_word_embeddings")
    return {**text, **{key: outer[key] for key in own}}


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    for key, wanted in family.only.items():
        if (value := raw.get(key)) is not None and value != wanted:
            raise SetupError(
                f"config.json: {key} is {value!r}; only {wanted!r} is supported for "
                f"{family.architecture}"
            )


def _activation(raw: Mapping[str, Any], family: Family) -> Activation:
    name = raw.get(family.activation_key) or "silu"
    if not isinstance(name, str) or name not in family.activations:
        raise SetupError(
            f"config.json: {family.activation_key} {name!r}; supported are "
            f"{', '.join(family.activations)}"
        )
    return family.activations[name]


def _check_ropes(ropes: tuple[RopeConfig | None, ...], head_dim: int) -> None:
    for rope in {rope for rope in ropes if rope is not None}:
        rotated = rope.rotary_dim(head_dim)
        if rotated < 2 or rotated % 2:
            raise SetupError(
                f"config.json: partial_rotary_factor {rope.partial} rotates {rotated} of the "
                f"head_dim {head_dim} values of a head; it must be an even number of them"
            )
        for name, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
            if rope.kind == "longrope" and len(factors) != rotated // 2:
                raise SetupError(
                    f"config.json: the RoPE parameter {name}_factor has {len(factors)} values; it "
                    f"must have {rotated // 2}, one for each pair of values that is rotated"
                )


def _attention_scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    if family.attention_multiplier_key is not None:
        return _multiplier(raw, family.attention_multiplier_key)
    if family.query_scalar_key is not None:
        return float(number(raw, family.query_scalar_key) ** -0.5)
    return float(head_dim**-0.5)


def _multiplier(raw: Mapping[str, Any], key: str | None) -> float:
    return 1.0 if key is None else number(raw, key, default=1.0)


def _initializer_range(raw: Mapping[str, Any]) -> float:
    """The standard deviation of dummy weights, which may be 0."""
    if raw.get("initializer_range") == 0:
        return 0.0
    return number(raw, "initializer_range", default=0.02)


def _soft_cap(raw: Mapping[str, Any], family: Family, key: str) -> float | None:
    """The soft cap `key`; null turns it off."""
    return number(raw, key) if family.soft_caps and raw.get(key) is not None else None


def _dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise SetupError(f"config.json: dtype {name!r}; supported are {', '.join(DTYPES)}")
    return str(name)
