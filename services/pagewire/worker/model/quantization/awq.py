"""The checkpoints whose quant_method is awq. This module needs no torch."""

from pagewire.worker.model.quantization.fields import Fields
from pagewire.worker.model.quantization.grouped import take_group
from pagewire.worker.model.quantization.scheme import (
    ALL,
    HEAD,
    GroupedScheme,
    Pattern,
    Quantization,
    Rule,
)


def parse_awq(fields: Fields) -> Quantization:
    """Weights of four bits with zero points, in the layout `gemm`."""
    bits = fields.take_one_of("bits", [4], fields.take("w_bit", 4))
    # Some tools write the layout in capitals.
    version = str(fields.take("version", "gemm")).lower()
    if version != "gemm":
        raise fields.refused("version", version, "supported is 'gemm'")
    fields.take_one_of("zero_point", [True], True)
    group = take_group(fields, fields.take("q_group_size", 128))
    names = fields.take_names("modules_to_not_convert")
    fields.skip("quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len")
    fields.check_all_taken()
    scheme = GroupedScheme(bits=bits, group=group, symmetric=False)
    ignored = (HEAD, *(Pattern(name, "contains") for name in names))
    return Quantization("awq", (Rule((ALL,), scheme),), ignored)
