"""Experts in config.json: how many there are, how a router chooses them, and in which layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.values import flag, positive


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys of config.json that describe the experts of a family."""

    default_count: int  # of experts, if config.json has none of `count_keys`
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    intermediate_size_key: str = "intermediate_size"  # of one expert
    # Whether the weights of a token's experts add up to 1.
    renormalize: bool | str = True
    # Intermediate size of an expert that sees every token, beside those that are chosen.
    shared_size_key: str | None = None
    # Whether `decoder_sparse_step` and `mlp_only_layers` leave layers without experts.
    some_layers: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a model, which weighs them by a softmax."""

    count: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    renormalize: bool
    shared_size: int | None  # intermediate size of the shared expert
    layers: tuple[bool, ...]  # by layer: whether it has experts

    def with_layers(self, layers: tuple[int, ...]) -> "ExpertsConfig":
        """The same experts in a model with only these layers."""
        return replace(self, layers=tuple(self.layers[layer] for layer in layers))


def read_experts(raw: Mapping[str, Any], keys: ExpertKeys | None) -> ExpertsConfig | None:
    """The experts of a model; None for a family without them."""
    if keys is None:
        return None
    count, top_k = _count(raw, keys), positive(raw, "num_experts_per_tok")
    if top_k > count:
        raise SetupError(
            f"config.json: num_experts_per_tok {top_k} is above the number of experts, {count}"
        )
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=positive(raw, keys.intermediate_size_key),
        renormalize=flag(raw, keys.renormalize),
        shared_size=positive(raw, keys.shared_size_key) if keys.shared_size_key else None,
        layers=_sparse_layers(raw, keys),
    )


def _count(raw: Mapping[str, Any], keys: ExpertKeys) -> int:
    found = {key: positive(raw, key) for key in keys.count_keys if raw.get(key) is not None}
    if len(set(found.values())) > 1:
        stated = " and ".join(f"{key} {value}" for key, value in found.items())
        raise SetupError(f"config.json: {stated} contradict each other; remove one of them")
    return next(iter(found.values()), keys.default_count)


def _sparse_layers(raw: Mapping[str, Any], keys: ExpertKeys) -> tuple[bool, ...]:
    layers = positive(raw, "num_hidden_layers")
    if not keys.some_layers:
        return (True,) * layers
    step, dense = positive(raw, "decoder_sparse_step", default=1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise SetupError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
