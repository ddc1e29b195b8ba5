"""Rotary position embedding in config.json: one for all layers, or two by layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.family import Family

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
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
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
    nested, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
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
    full = {**(nested.get(FULL) or {}), **scaling}
    base = None if key is None else raw.get(key)
    local = {"rope_theta": base or default, **(nested.get(SLIDING) or {})}
    return _parse(raw, family, full), _parse(raw, family, local)


def _parse(raw: Mapping[str, Any], family: Family, parameters: Parameters) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "long_factor" in parameters):
        kind = "longrope"  # older names of Phi-3
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
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
        trained = {"original_max_position_embeddings": raw["max_position_embeddings"]}
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
    return RopeConfig(
        "llama3",
        theta,
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position_embeddings=_original(parameters),
        partial=partial,
    )


def _yarn(
    raw: Mapping[str, Any], family: Family, theta: float, partial: float, given: Parameters
) -> RopeConfig:
    original = _original(given)
    factor = _factor(raw, given, original)
    attention = given.get("attention_factor")
    if attention is None:
        attention = _yarn_attention(factor, given.get("mscale"), given.get("mscale_all_dim"))
    scores = 1.0
    if family.latent and given.get("mscale_all_dim"):
        scores = _yarn_scale(factor, given["mscale_all_dim"]) ** 2
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial=partial,
        attention_factor=float(attention),
        score_factor=scores,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
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
    attention = given.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial=partial,
        attention_factor=float(attention),
        short_factors=_factors(given, "short_factor"),
        long_factors=_factors(given, "long_factor"),
    )


def _factor(raw: Mapping[str, Any], parameters: Parameters, original: int) -> float:
    """`factor`; without it, the ratio by which the trained length was extended."""
    if parameters.get("factor") is None:
        return float(raw["max_position_embeddings"] / original)
    return _number(parameters, "factor")


def _original(parameters: Parameters) -> int:
    return int(_number(parameters, "original_max_position_embeddings"))


def _factors(parameters: Parameters, name: str) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and value > 0 for value in values
    ):
        raise SetupError(
            f"config.json: the RoPE parameter {name} is {values!r}; it must be a list of numbers "
            "above 0"
        )
    return tuple(float(value) for value in values)


def _number(parameters: Parameters, name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise SetupError(f"config.json: the RoPE parameter {name} is {value!r}; it must be above 0")
    return float(value)
