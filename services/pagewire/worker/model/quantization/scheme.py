"""Which linear layers of a model are quantized, and how. This module needs no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Where the weights come from: a kind of checkpoint, or a plain one that is quantized while loading.
Method = Literal["compressed-tensors", "fp8", "gptq", "gptq_v2", "awq", "mxfp4", "online"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights and inputs in FP8 (E4M3).

    A weight has a scale for each of its blocks of `block` rows and columns, else one for each
    output channel; `per_tensor` says that the checkpoint stores a single one. Inputs have `static`
    scales from the checkpoint, else one a token, or one for each 128 inputs of it with blocks.
    """

    block: tuple[int, int] | None = None
    per_tensor: bool = False
    static: bool = False


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """Weights in INT8 with a scale for each output channel, inputs as those of `Fp8Scheme`."""

    per_tensor: bool = False
    static: bool = False


@dataclass(frozen=True, slots=True)
class GroupedScheme:
    """Weights of 4 or 8 bits with a scale for each `group` inputs of a channel; None is all.

    `symmetric` weights have no zero points. In `ordered` ones, groups hold inputs in any order.
    `float4` weights are not integers (`GroupedWeight`).
    """

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool = False
    float4: bool = False


Scheme = Fp8Scheme | Int8Scheme | GroupedScheme


@dataclass(frozen=True, slots=True)
class Pattern:
    """Names of layers: `text` and how it is compared with a name.

    `exact` is the whole name, `regex` matches from its beginning, `contains` is found anywhere,
    `path` is a run of whole parts between the dots. `all` is every layer.
    """

    text: str
    kind: Literal["exact", "regex", "contains", "path", "all"]

    def matches(self, name: str) -> bool:
        """Whether the pattern describes the layer of this name."""
        if self.kind == "regex":
            return re.match(self.text, name) is not None
        if self.kind == "contains":
            return self.text in name
        if self.kind == "path":
            return f".{self.text}." in f".{name}."
        return self.kind == "all" or self.text == name


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the layers that any of the `targets` matches."""

    targets: tuple[Pattern, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's linear layers are quantized. The first rule that matches a layer is its own."""

    method: Method
    rules: tuple[Rule, ...]
    ignored: tuple[Pattern, ...] = ()
    fp8_kv: bool = False  # whether the checkpoint asks for a KV cache in FP8

    @property
    def has_fp8(self) -> bool:
        """Whether any layer may be in FP8."""
        return any(isinstance(rule.scheme, Fp8Scheme) for rule in self.rules)

    @property
    def has_ordered(self) -> bool:
        """Whether groups of any layer may have inputs in any order."""
        schemes = (rule.scheme for rule in self.rules)
        return any(isinstance(scheme, GroupedScheme) and scheme.ordered for scheme in schemes)

    def scheme_of(self, *names: str) -> Scheme | None:
        """The scheme of a layer, by its names in checkpoints; None if it is not quantized."""
        if _any(self.ignored, names):
            return None
        # Names come before patterns, and patterns before the class of all linear layers.
        for kinds in (("exact",), ("regex", "contains", "path"), ("all",)):
            for rule in self.rules:
                if _any([target for target in rule.targets if target.kind in kinds], names):
                    return rule.scheme
        return None


def _any(patterns: Sequence[Pattern], names: Sequence[str]) -> bool:
    return any(pattern.matches(name) for pattern in patterns for name in names)


ALL = Pattern("", "all")
HEAD = Pattern("lm_head", "exact")
