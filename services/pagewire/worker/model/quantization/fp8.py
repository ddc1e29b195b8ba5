"""The checkpoints whose quant_method is fp8. This module needs no torch."""

from pagewire.worker.model.quantization.fields import Fields
from pagewire.worker.model.quantization.scheme import (
    ALL,
    HEAD,
    Fp8Scheme,
    Pattern,
    Quantization,
    Rule,
)

BLOCK = (128, 128)


def parse_fp8(fields: Fields) -> Quantization:
    """Weights with one scale a tensor, or one for each block of 128 by 128."""
    fields.take_one_of("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    fields.take_one_of("is_checkpoint_fp8_serialized", [True], True)
    static = fields.take_one_of("activation_scheme", ["dynamic", "static"], "dynamic") == "static"
    size = fields.take("weight_block_size")
    if size is not None and size != list(BLOCK):
        raise fields.refused("weight_block_size", size, f"supported is {list(BLOCK)}")
    if size is not None and static:
        raise fields.refused("activation_scheme", "static", "blocks have dynamic activations")
    if fields.take("kv_cache_scheme") is not None:
        raise fields.refused("kv_cache_scheme", "given", "the KV cache is not quantized")
    names = (*fields.take_names("ignored_layers"), *fields.take_names("modules_to_not_convert"))
    fields.skip("quant_method", "quantization_status", "dequantize")
    fields.check_all_taken()
    scheme = Fp8Scheme(block=BLOCK if size else None, per_tensor=size is None, static=static)
    ignored = (HEAD, *(Pattern(name, "path") for name in names))
    return Quantization("fp8", (Rule((ALL,), scheme),), ignored)
