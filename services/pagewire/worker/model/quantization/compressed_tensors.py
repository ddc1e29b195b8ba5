"""The checkpoints whose quant_method is compressed-tensors. This module needs no torch."""

import re

from pagewire.worker.model.quantization.fields import Fields
from pagewire.worker.model.quantization.fp8 import BLOCK, take_kv_cache
from pagewire.worker.model.quantization.grouped import take_group
from pagewire.worker.model.quantization.scheme import (
    ALL,
    Fp8Scheme,
    GroupedScheme,
    Int8Scheme,
    Pattern,
    Quantization,
    Rule,
    Scheme,
)

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
MIXED = "mixed-precision"  # each group then has its own format


def parse_compressed_tensors(fields: Fields) -> Quantization:
    """Weights with the scheme of the first of `config_groups` that has a matching target."""
    stored = fields.take_one_of("format", [*FORMATS, MIXED], None)
    # Older exporters store compressed weights with the status "frozen".
    fields.take_one_of("quantization_status", ["compressed", "frozen"], "compressed")
    fp8_kv = take_kv_cache(fields)
    sparsity = fields.take_object("sparsity_config")
    if sparsity is not None:
        sparsity.take_one_of("format", ["dense"], "dense")
    ignored = _patterns(fields, "ignore")
    groups = fields.take_object("config_groups")
    if groups is None:
        raise fields.refused("config_groups", None, "it must describe at least one group")
    rules = tuple(_rule(groups, name, stored) for name in groups.names())
    fields.skip("quant_method", "global_compression_ratio", "version")
    fields.check_all_taken()
    return Quantization("compressed-tensors", rules, ignored, fp8_kv)


def _patterns(fields: Fields, field: str) -> tuple[Pattern, ...]:
    patterns = tuple(_pattern(name) for name in fields.take_names(field))
    for pattern in patterns:
        if pattern.kind == "regex":
            try:
                re.compile(pattern.text)
            except re.error as error:
                why = f"it is not a regular expression: {error}"
                raise fields.refused(field, f"re:{pattern.text}", why) from error
    return patterns


def _pattern(name: str) -> Pattern:
    """A target: a layer's name, a pattern after `re:`, or the class of linear layers."""
    if name.startswith("re:"):
        return Pattern(name.removeprefix("re:"), "regex")
    return ALL if name == "Linear" else Pattern(name, "exact")


def _rule(groups: Fields, name: str, stored: str) -> Rule:
    group = groups.take_object(name)
    if group is None:
        raise groups.refused(name, None, "it must be an object")
    stored = group.take_one_of("format", FORMATS, None if stored == MIXED else stored)
    targets = _patterns(group, "targets")
    weights, inputs = group.take_object("weights"), group.take_object("input_activations")
    if weights is None:
        raise group.refused("weights", None, "weights must be quantized")
    if group.take("output_activations") is not None:
        raise group.refused("output_activations", "given", "outputs are not quantized")
    group.check_all_taken()
    return Rule(targets, _scheme(weights, inputs, stored))


def _scheme(weights: Fields, inputs: Fields | None, stored: str) -> Scheme:
    kind = weights.take_one_of("type", ["float", "int"], "int")
    weights.take_one_of("dynamic", [False], False)
    if stored == "pack-quantized":
        return _grouped(weights, inputs, kind)
    if inputs is None:
        raise weights.refused("num_bits", 8, "weights alone may be quantized if they are packed")
    weights.take_one_of("num_bits", [8], 8)
    weights.take_one_of("symmetric", [True], True)
    inputs.take_one_of("num_bits", [8], 8)
    inputs.take_one_of("type", [kind], kind)
    inputs.take_one_of("symmetric", [True], True)
    strategies = ["tensor", "channel", "block"] if kind == "float" else ["tensor", "channel"]
    strategy = weights.take_one_of("strategy", strategies, "tensor")
    block = strategy == "block"
    structure = weights.take("block_structure")
    if block and structure not in (list(BLOCK), "128x128"):
        raise weights.refused("block_structure", structure, f"supported is {list(BLOCK)}")
    static = _take_static(inputs, block)
    _finish(weights)
    _finish(inputs)
    per_tensor = strategy == "tensor"
    if kind == "int":
        return Int8Scheme(per_tensor=per_tensor, static=static)
    return Fp8Scheme(block=BLOCK if block else None, per_tensor=per_tensor, static=static)


def _take_static(inputs: Fields, block: bool) -> bool:
    """Whether the scales of inputs are stored, one a layer."""
    if block:
        inputs.take_one_of("dynamic", [True], False)
        inputs.take_one_of("strategy", ["group"], None)
        inputs.take_one_of("group_size", [BLOCK[1]], None)
        return False
    if inputs.take_one_of("dynamic", [True, False], False):
        inputs.take_one_of("strategy", ["token"], None)
        return False
    inputs.take_one_of("strategy", ["tensor"], "tensor")
    return True


def _grouped(weights: Fields, inputs: Fields | None, kind: str) -> GroupedScheme:
    if inputs is not None:
        raise inputs.refused(
            "num_bits", inputs.take("num_bits"), "packed weights have plain inputs"
        )
    if kind != "int":
        raise weights.refused("type", kind, "packed weights are integers")
    bits = weights.take_one_of("num_bits", [4, 8], 8)
    symmetric = weights.take_one_of("symmetric", [True, False], True)
    strategy = weights.take_one_of("strategy", ["group", "channel"], None)
    group = take_group(weights, -1) if strategy == "group" else None
    order = weights.take_one_of(
        "actorder", ["group", "dynamic", "weight", "static", True, False], False
    )
    _finish(weights)
    ordered = order in ("group", "dynamic", True)
    return GroupedScheme(bits=bits, group=group, symmetric=symmetric, ordered=ordered)


def _finish(fields: Fields) -> None:
    """Checks the other fields: the method of finding scales, and types of zero points in memory."""
    fields.skip("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    if fields.take("group_size") not in (None, -1):
        raise fields.refused("group_size", "given", "it needs the strategy 'group'")
    fields.check_all_taken()
