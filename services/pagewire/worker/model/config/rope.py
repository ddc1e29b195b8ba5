"""Rotary position embedding in config.json: one for all layers, or two by layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.family import Family
from pagewire.worker.model.config.values import LARGEST, above_zero, positive

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Parameters = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
_SCALED = ("llama3", "yarn", "longrope")  # these kinds use the length before scaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base `theta` and how the frequencies are scaled.

    All scaled kinds use `factor`, except `longrope`, which has a factor for each frequency.
    `llama3`, `yarn` and `longrope` use `original_max_position_embeddings`.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    partial: float = 1.0  # the fraction of each head that is rotated
    attention_factor: float = 1.0  # multiplies cosines and sines
    score_factor: float = 1.0  # multiplies the scores of latent attention
    beta_fast: float = 32.0  # of yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # of longrope, one for each frequency
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """The values of each head that are rotated."""
        return int(head_dim * self.partial)


def _read_rope(raw: Mapping[str, Any], family: Family) -> RopeConfig:
    """Reads `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`."""
    parameters = _object(raw, "rope_scaling") or _object(raw, "rope_parameters")
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise SetupError(
            f"config.json: RoPE has parameters of its own for {', '.join(nested)}; only models "
            "with the same for all layers are supported"
        )
    return _parse(raw, family, parameters)


def read_ropes(raw: Mapping[str, Any], family: Family) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers that see all positions, and of layers with a window."""
    if family.local_rope is None:
        rope = _read_rope(raw, family)
        return rope, rope
    nested, scaling = _object(raw, "rope_parameters"), _object(raw, "rope_scaling")
    if unknown := [name for name in nested if name not in (FULL, SLIDING)]:
        raise SetupError(
            f"config.json: rope_parameters has {', '.join(unknown)}; {family.architecture} has "
            f"parameters for {FULL} and for {SLIDING}"
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise SetupError(
            f"config.json: rope_scaling has type {scaling['type']!r}; {family.architecture} calls "
            "it rope_type"
        )
    key, default = family.local_rope
    full = {**_object(nested, FULL), **scaling}
    base = None if key is None else raw.get(key)
    local = {"rope_theta": base or default, **_object(nested, SLIDING)}
    return _parse(raw, family, full), _parse(raw, family, local)


def _object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object `key`, empty if there is none; SetupError if the value is of another kind."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise SetupError(f"config.json: {key} is {value!r}; it must be an object or null")
    return value


def _parse(raw: Mapping[str, Any], family: Family, parameters: Parameters) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "long_factor" in parameters):
        kind = "longrope"  # older names of Phi-3
    theta = parameters.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if not above_zero(theta) or theta <= 1:
        raise SetupError(f"config.json: rope_theta is {theta!r}; it must be a number above 1")
    theta = float(theta)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    least = 0 if family.partial_rotary else 1
    if not isinstance(partial, int | float) or not (0 < partial <= 1 and partial >= least):
        supported = "it must be above 0, and 1 at most" if least == 0 else "only 1 is supported"
        raise SetupError(
            f"config.json: partial_rotary_factor is {partial!r}; for {family.architecture} "
            f"{supported}"
        )
    if kind in _SCALED:
        length = raw.get("original_max_position_embeddings")
        trained = {"original_max_position_embeddings": positive(raw, "max_position_embeddings")}
        parameters = {**trained, **parameters}
        if length is not None:
            parameters = {**parameters, "original_max_position_embeddings": length}
    if family.latent and kind not in ("default", "yarn") and parameters.get("mscale_all_dim"):
        raise SetupError(
            f"config.json: the RoPE parameter mscale_all_dim is {parameters['mscale_all_dim']!r} "
            f"with RoPE of type {kind!r}; for {family.architecture} it is supported with yarn"
        )
    match kind:
        case "default":
            return RopeConfig("default", theta, partial=partial)
        case "linear" | "dynamic":
            return RopeConfig(kind, theta, factor=_number(parameters, "factor"), partial=partial)
        case "llama3":
            return _llama3(theta, partial, parameters)
        case "yarn":
            return _yarn(raw, family, theta, partial, parameters)
        case "longrope":
            return _longrope(raw, theta, partial, parameters)
    raise SetupError(
        f"config.json: RoPE of type {kind!r} is not supported; these are: default, linear, "
        "dynamic, llama3, yarn, longrope"
    )


def _llama3(theta: float, partial: float, parameters: Parameters) -> RopeConfig:
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if low >= high:
        raise SetupError(
            f"config.json: the RoPE parameter low_freq_factor is {low:g}; it must be below "
            f"high_freq_factor, which is {high:g}"
        )
    return RopeConfig(
        "llama3",
        theta,
        factor=_number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original(parameters),
        partial=partial,
    )


def _yarn(
    raw: Mapping[str, Any], family: Family, theta: float, partial: float, given: Parameters
) -> RopeConfig:
    original = _original(given)
    factor = _factor(raw, given, original)
    attention = _attention_factor(given)
    all_dim = _optional(given, "mscale_all_dim", 0.0)
    if attention is None:
        attention = _yarn_attention(factor, _optional(given, "mscale", 0.0), all_dim)
    scores = _yarn_scale(factor, all_dim) ** 2 if family.latent and all_dim else 1.0
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial=partial,
        attention_factor=attention,
        score_factor=scores,
        beta_fast=_optional(given, "beta_fast", 32.0),
        beta_slow=_optional(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The factor of cosines and sines (Peng et al., 2023, "YaRN"; DeepSeek-AI for the `mscale`)."""
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _longrope(
    raw: Mapping[str, Any], theta: float, partial: float, given: Parameters
) -> RopeConfig:
    """LongRoPE (Ding et al., 2024) with the attention factor of Phi-3."""
    original = _original(given)
    factor = _factor(raw, given, original)
    attention = _attention_factor(given)
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial=partial,
        attention_factor=attention,
        short_factors=_factors(given, "short_factor"),
        long_factors=_factors(given, "long_factor"),
    )


def _factor(raw: Mapping[str, Any], parameters: Parameters, original: int) -> float:
    """`factor`; without it, the ratio by which the trained length was extended."""
    if parameters.get("factor") is None:
        return positive(raw, "max_position_embeddings") / original
    return _number(parameters, "factor")


def _original(parameters: Parameters) -> int:
    length = _number(parameters, "original_max_position_embeddings")
    if length < 2 or length > LARGEST or length % 1:
        raise SetupError(
            f"config.json: original_max_position_embeddings is {length:g}; it must be an integer "
            f"from 2 to {LARGEST}"
        )
    return int(length)


def _factors(parameters: Parameters, name: str) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list) or not all(above_zero(value) for value in values):
        raise SetupError(
            f"config.json: the RoPE parameter {name} is {values!r}; it must be a list of numbers "
            "above 0"
        )
    return tuple(float(value) for value in values)


def _number(parameters: Parameters, name: str) -> float:
    value = parameters.get(name)
    if not above_zero(value):
        raise SetupError(
            f"config.json: the RoPE parameter {name} is {value!r}; it must be a number above 0"
        )
    return float(value)


def _attention_factor(parameters: Parameters) -> float | None:
    given = parameters.get("attention_factor") is not None
    return _number(parameters, "attention_factor") if given else None


def _optional(parameters: Parameters, name: str, default: float) -> float:
    """The number `name`, or `default` where it is null or 0, as in transformers."""
    return _number(parameters, name) if parameters.get(name) else default
