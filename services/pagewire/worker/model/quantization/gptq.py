"""The checkpoints whose quant_method is gptq. This module needs no torch."""

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


def parse_gptq(fields: Fields) -> Quantization:
    """Weights of four or eight bits; `desc_act` stores the group of each input."""
    bits = fields.take_one_of("bits", [4, 8], None)
    symmetric = fields.take_one_of("sym", [True, False], True)
    ordered = fields.take_one_of("desc_act", [True, False], False)
    group = take_group(fields, -1)
    formats = ["gptq", "gptq_v2"]
    stored = fields.take_one_of(
        "checkpoint_format", formats, fields.take_one_of("format", formats, "gptq")
    )
    fields.take_one_of("pack_dtype", ["int32"], "int32")
    inside = fields.take_names("modules_in_block_to_quantize")
    head = fields.take_one_of("lm_head", [True, False], False)
    # These fields say how the weights were found. `g_idx` describes the groups of `static_groups`.
    fields.skip(
        *("quant_method", "damp_percent", "static_groups", "true_sequential", "model_name_or_path"),
        *("model_file_base_name", "dataset", "tokenizer", "backend", "exllama_config", "meta"),
        *("use_cuda_fp16", "use_exllama", "max_input_length", "batch_size", "pad_token_id"),
        *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("cache_block_outputs", "disable_exllama", "quant_linear", "mse", "true_seq"),
        *("hyb_act", "act_group_aware", "damp_auto_increment", "group_aware"),
    )
    fields.check_all_taken()
    scheme = GroupedScheme(bits=bits, group=group, symmetric=symmetric, ordered=ordered)
    targets = tuple(Pattern(name, "path") for name in inside) if inside else (ALL,)
    if inside and head:
        targets += (HEAD,)
    return Quantization(stored, (Rule(targets, scheme),), () if head else (HEAD,))
