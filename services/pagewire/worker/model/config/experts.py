"""Experts in config.json: how many there are, how a router chooses them, and in which layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.values import MOST_PARTS, flag, number, positive


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys of config.json that describe the experts of a family."""

    default_count: int  # of experts, if config.json has none of `count_keys`
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    intermediate_size_key: str = "intermediate_size"  # of one expert
    # Whether the weights of a token's experts add up to 1.
    renormalize: bool | str = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # `sigmoid` has a correction of each expert
    scaled: bool = False  # weights are multiplied by `routed_scaling_factor`
    # Whether experts form the groups of `n_group` and `topk_group`; `by_method`: if `topk_method`
    # is `group_limited_greedy`, not if it is `greedy`.
    grouped: Literal["no", "yes", "by_method"] = "no"
    # Intermediate size of a shared expert, which computes every token. It has a gate, unless
    # `shared_count_key` names the number of shared experts.
    shared_size_key: str | None = None
    shared_count_key: str | None = None
    # Layers without experts: those of `decoder_sparse_step` and `mlp_only_layers`, or the first
    # `first_k_dense_replace`, or those that `mlp_layer_types` calls dense (without that key, the
    # first layer).
    dense_layers: Literal["none", "step", "first", "types"] = "none"
    # gpt-oss: router and experts have biases, `swiglu_alpha` and `swiglu_limit` define the clamped
    # activation, and checkpoints store experts transposed, with gates and values in turns.
    gpt_oss: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a model. `Routing` of the operations explains how they are chosen."""

    count: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"]
    scale: float  # of the weights
    groups: int
    top_groups: int
    shared_size: int | None  # intermediate size of the shared experts together
    shared_gate: bool
    layers: tuple[bool, ...]  # by layer: whether it has experts
    bias: bool = False  # of the router, and of both matrices of each expert
    clamp: tuple[float, float] | None = None  # alpha and limit of the clamped SwiGLU
    # Stored as `[experts, in, out]` with a column of a gate before each column of a value.
    transposed: bool = False

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
    groups, top_groups = (1, 1)
    if _is_grouped(raw, keys):
        groups, top_groups = _groups(raw, keys, count, top_k)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=positive(raw, keys.intermediate_size_key),
        renormalize=flag(raw, keys.renormalize),
        scoring=keys.scoring,
        scale=number(raw, "routed_scaling_factor", default=1.0) if keys.scaled else 1.0,
        groups=groups,
        top_groups=top_groups,
        shared_size=_shared_size(raw, keys),
        shared_gate=keys.shared_size_key is not None and keys.shared_count_key is None,
        layers=_sparse_layers(raw, keys),
        bias=keys.gpt_oss,
        clamp=(number(raw, "swiglu_alpha"), number(raw, "swiglu_limit")) if keys.gpt_oss else None,
        transposed=keys.gpt_oss,
    )


def _is_grouped(raw: Mapping[str, Any], keys: ExpertKeys) -> bool:
    if keys.grouped != "by_method":
        return keys.grouped == "yes"
    method = raw.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise SetupError(
            f"config.json: topk_method is {method!r}; supported are greedy and group_limited_greedy"
        )
    return method == "group_limited_greedy"


def _groups(raw: Mapping[str, Any], keys: ExpertKeys, count: int, top_k: int) -> tuple[int, int]:
    """The number of groups of experts, and how many groups a token chooses from."""
    groups, top_groups = positive(raw, "n_group", 1), positive(raw, "topk_group", 1)
    least = 2 if keys.scoring == "sigmoid" else 1  # a group's score sums this many of its experts
    if groups > 1 and (count % groups or count < least * groups):
        raise SetupError(
            f"config.json: n_group {groups} does not cut {count} experts to groups of {least} or "
            "more"
        )
    if top_groups > groups or top_k > top_groups * (count // groups):
        raise SetupError(
            f"config.json: topk_group {top_groups} of n_group {groups} groups have no "
            f"{top_k} experts to choose, as num_experts_per_tok says"
        )
    return groups, top_groups


def _shared_size(raw: Mapping[str, Any], keys: ExpertKeys) -> int | None:
    if keys.shared_size_key is None:
        return None
    count = 1 if keys.shared_count_key is None else positive(raw, keys.shared_count_key)
    return count * positive(raw, keys.shared_size_key)


def _count(raw: Mapping[str, Any], keys: ExpertKeys) -> int:
    given = [key for key in keys.count_keys if raw.get(key) is not None]
    found = {key: positive(raw, key, most=MOST_PARTS) for key in given}
    if len(set(found.values())) > 1:
        stated = " and ".join(f"{key} {value}" for key, value in found.items())
        raise SetupError(f"config.json: {stated} contradict each other; remove one of them")
    return next(iter(found.values()), keys.default_count)


def _sparse_layers(raw: Mapping[str, Any], keys: ExpertKeys) -> tuple[bool, ...]:
    layers = positive(raw, "num_hidden_layers")
    if keys.dense_layers == "none":
        return (True,) * layers
    if keys.dense_layers == "first":
        first = raw.get("first_k_dense_replace")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise SetupError(
                f"config.json: first_k_dense_replace is {first!r}; it must be a number of layers"
            )
        return tuple(layer >= first for layer in range(layers))
    if keys.dense_layers == "types":
        types = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
        if len(types) != layers or set(types) - {"dense", "sparse"}:
            raise SetupError(
                f"config.json: mlp_layer_types is {types!r}; it must be a list of dense or sparse "
                f"for each of {layers} layers"
            )
        return tuple(kind == "sparse" for kind in types)
    step, dense = positive(raw, "decoder_sparse_step", default=1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise SetupError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
