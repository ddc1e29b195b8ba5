"""The checkpoints whose quant_method is mxfp4. This module needs no torch."""

from pagewire.worker.model.quantization.fields import Fields
from pagewire.worker.model.quantization.scheme import GroupedScheme, Pattern, Quantization, Rule

GROUP = 32  # values of a scale, by the format's definition


def parse_mxfp4(fields: Fields) -> Quantization:
    """Experts in four bits, as gpt-oss has them; all other layers are plain."""
    names = fields.take_names("modules_to_not_convert")
    # `dequantize` only concerns the form that transformers keeps in memory.
    fields.skip("quant_method", "dequantize")
    fields.check_all_taken()
    scheme = GroupedScheme(bits=4, group=GROUP, symmetric=True, float4=True)
    experts = Rule((Pattern("mlp.experts", "path"),), scheme)
    return Quantization("mxfp4", (experts,), tuple(Pattern(name, "regex") for name in names))
