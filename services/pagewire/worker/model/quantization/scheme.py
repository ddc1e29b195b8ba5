"""Which linear layers of a model are quantized, and how. This module needs no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# The source of the weights: a kind of checkpoint, or a plain checkpoint that loading quantizes.
Method = Literal["compressed-tensors", "fp8", "gptq", "gptq_v2", "awq", "mxfp4", "online"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights and inputs in FP8 (E4M3).

    A weight has a scale for each block of `block` rows and columns, else one for each output
    channel; `per_tensor` means that the checkpoint stores a single scale. Inputs have `static`
    scales from the checkpoint, else one for each token, or with blocks one for each 128 inputs of a
    token.
    """

    block: tuple[int, int] | None = None
    per_tensor: bool = False
    static: bool = False


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """Weights in INT8 with a scale for each output channel; inputs as in `Fp8Scheme`."""

    per_tensor: bool = False
    static: bool = False


@dataclass(frozen=True, slots=True)
class GroupedScheme:
    """Weights of 4 or 8 bits with a scale for each `group` inputs of a channel; None: all inputs.

    `symmetric` weights have no zero points. Groups of `ordered` weights have inputs in any order.
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
    """A pattern of layer names: `text`, and how it is compared with a name.

    `exact` is the whole name, `regex` matches from the name's beginning, `contains` matches
    anywhere, `path` is a run of whole parts between dots. `all` matches every layer.
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
    """The scheme of all layers that match one of the `targets`."""

    targets: tuple[Pattern, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's linear layers are quantized. The first rule that matches a layer applies."""

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
