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
    """Weights with one scale for each tensor, or for each block of 128 by 128."""
    fields.take_one_of("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    fields.take_one_of("is_checkpoint_fp8_serialized", [True], True)
    static = fields.take_one_of("activation_scheme", ["dynamic", "static"], "dynamic") == "static"
    size = fields.take("weight_block_size")
    if size is not None and size != list(BLOCK):
        raise fields.refused("weight_block_size", size, f"supported is {list(BLOCK)}")
    if size is not None and static:
        raise fields.refused("activation_scheme", "static", "blocks have dynamic activations")
    fp8_kv = take_kv_cache(fields)
    names = (*fields.take_names("ignored_layers"), *fields.take_names("modules_to_not_convert"))
    fields.skip("quant_method", "quantization_status", "dequantize")
    fields.check_all_taken()
    scheme = Fp8Scheme(block=BLOCK if size else None, per_tensor=size is None, static=static)
    ignored = (HEAD, *(Pattern(name, "path") for name in names))
    return Quantization("fp8", (Rule((ALL,), scheme),), ignored, fp8_kv)


def take_kv_cache(fields: Fields) -> bool:
    """Whether `kv_cache_scheme` asks for a KV cache in FP8.

    The worker then stores keys and values in FP8 with scales of its own, one a token and head.
    These scales are finer than those in the checkpoint, one a layer, which are not read.

    Raises:
        SetupError: a scheme of another kind.
    """
    scheme = fields.take_object("kv_cache_scheme")
    if scheme is None:
        return False
    scheme.take_one_of("num_bits", [8], 8)
    scheme.take_one_of("type", ["float"], "int")
    scheme.take_one_of("symmetric", [True], True)
    scheme.take_one_of("strategy", ["tensor"], None)
    scheme.take_one_of("dynamic", [False], False)
    scheme.skip("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    scheme.check_all_taken()
    return True
