"""Which layers have a sliding window, and which have rotary embedding."""

from collections.abc import Mapping
from typing import Any

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.family import Family
from pagewire.worker.model.config.rope import FULL, SLIDING, RopeConfig, read_ropes
from pagewire.worker.model.config.values import MOST_PARTS, names, positive


def read_windows(raw: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The window of each layer: the positions that a token sees, or None for all."""
    layers = positive(raw, "num_hidden_layers", most=MOST_PARTS)
    listed = _layer_types(raw, layers)
    on = family.windowed_by is not None and raw.get(family.windowed_by)
    if not family.local_rope and (not on or raw.get("sliding_window") is None):
        return (None,) * layers
    types = (listed if family.layer_types else []) or _default_types(raw, family, layers)
    if SLIDING not in types:
        return (None,) * layers
    window = positive(raw, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def read_layer_ropes(
    raw: Mapping[str, Any], family: Family, windows: tuple[int | None, ...]
) -> tuple[RopeConfig | None, ...]:
    """RoPE of each layer; None for a layer without it."""
    full, local = read_ropes(raw, family)
    ropes = [full if window is None else local for window in windows]
    return tuple(
        rope if rotary else None
        for rope, rotary in zip(ropes, _rotary_layers(raw, family, windows), strict=True)
    )


def _rotary_layers(
    raw: Mapping[str, Any], family: Family, windows: tuple[int | None, ...]
) -> list[bool]:
    layers = len(windows)
    if family.rotary_layers == "position_embedding_type":
        return [raw.get("position_embedding_type") == "rope"] * layers
    any_window = raw.get("sliding_window") is not None
    if family.rotary_layers == "windowed" or (
        family.rotary_layers == "windowed_if_any" and any_window
    ):
        return [window is not None for window in windows]
    if family.rotary_layers != "no_rope_layers":
        return [True] * layers
    marks = raw.get("no_rope_layers")
    if marks is None:
        interval = positive(raw, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers:
        raise SetupError(
            f"config.json: no_rope_layers is {marks!r}; it must be a list of 0 or 1 for each of "
            f"{layers} layers"
        )
    return [bool(mark) for mark in marks]


def _layer_types(raw: Mapping[str, Any], layers: int) -> list[str]:
    types = [FULL if kind == "attention" else kind for kind in names(raw, "layer_types")]
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise SetupError(
            f"config.json: layer_types has {', '.join(sorted(unknown))}; only {FULL} and "
            f"{SLIDING} are supported"
        )
    if types and len(types) != layers:
        raise SetupError(
            f"config.json: layer_types has {len(types)} values for {layers} layers; it must have "
            "one for each"
        )
    return types


def _default_types(raw: Mapping[str, Any], family: Family, layers: int) -> list[str]:
    """The types of the layers, if config.json does not list them."""
    pattern = family.window_pattern
    if family.window_pattern_key is not None:
        pattern = positive(raw, family.window_pattern_key, default=pattern)
    if pattern is not None:
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    if family.rotary_layers == "no_rope_layers":  # a window instead of RoPE
        rotary = _rotary_layers(raw, family, (None,) * layers)
        return [FULL if rope else SLIDING for rope in rotary]
    if family.windowed_by == "sliding_window":
        return [SLIDING] * layers
    first = raw["max_window_layers"]  # the layers before have full attention
    if not isinstance(first, int):
        raise SetupError(f"config.json: max_window_layers is {first!r}; it must be an integer")
    return [FULL if layer < first else SLIDING for layer in range(layers)]
