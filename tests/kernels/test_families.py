"""Whole models on the kernels: layers of every form have the logits of the reference operations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.decoder import Batch, Decoder, Prefill, SampledTokens
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.ops import Name, load_ops
from support.kernels.comparison import CUDA, assert_near
from support.models.quantized_experts import save_mxfp4, save_quantized_experts
from support.models.quantized_models import awq, fp8_blocks, save_quantized
from support.models.tiny_models import VOCAB, save_model

BLOCK_SIZE = 16
PROMPTS = ([7, 90, 12, 180, 3, 44] * 5, [5, 6])  # the first is longer than the windows
EXPERT_SIZES = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LENGTHS = [len(prompt) for prompt in PROMPTS]


def logits(folder: Path, ops: Name, device: torch.device, fp8_kv: bool = False) -> Tensor:
    """The logits `[2 * prompts, vocab]` of prefill and of a decode step."""
    config = replace(read_model_config(folder).with_heads_for_kernels(), fp8_kv=fp8_kv)
    weights = load_weights(folder, config, torch.float32, device)
    tables = rope_tables(config, 64, device)
    decoder = Decoder(config, weights, load_ops(ops), tables)
    cache = empty_cache(config, 8, BLOCK_SIZE, torch.float32, device)
    blocks = ints([[1, 2, 3], [4, 5, 6], [0, 0, 0]], device)
    starts = [0, LENGTHS[0], sum(LENGTHS)]
    batch = Batch(
        token_ids=ints([token for prompt in PROMPTS for token in prompt], device),
        positions=ints([at for length in LENGTHS for at in range(length)], device),
        slots=ints([slot for slot, length in enumerate(LENGTHS) for _ in range(length)], device),
        num_decodes=0,
        decode_lengths=ints([], device),
        prefill=Prefill(ints([0, 1], device), ints(starts, device), ints(LENGTHS, device), 30),
        sampled=SampledTokens(
            ints([end - 1 for end in starts[1:]], device),
            ints([0, 1], device),
            ints(LENGTHS, device),
        ),
    )
    found = [decoder.logits(decoder.hidden(batch, cache, blocks))]
    batch = Batch(
        token_ids=ints([11, VOCAB - 1], device),
        positions=ints(LENGTHS, device),
        slots=ints([0, 1], device),
        num_decodes=2,
        decode_lengths=ints([length + 1 for length in LENGTHS], device),
        prefill=None,
    )
    found.append(decoder.logits(decoder.hidden(batch, cache, blocks)))
    return torch.cat(found)


def ints(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama-general", {}),
        ("gemma2", {"head_dim": 24}),
        ("gemma3", {"head_dim": 16}),
        ("glm4", {}),
        ("olmo2", {}),
        ("exaone4-window", {}),
        ("starcoder2", {}),
        ("cohere2", {"hidden_size": 48}),
        ("granite", {}),
        ("deepseek-v2", {}),
        ("deepseek-v2-lite", {}),
        ("deepseek-v3", {}),
        ("gpt-oss", {}),
    ],
)
def test_logits_are_those_of_the_reference(tmp_path, variant, changes, device):
    save_model(tmp_path, variant, num_hidden_layers=2, **changes)
    with torch.inference_mode():
        expected = logits(tmp_path, "torch", device)
        assert_near(logits(tmp_path, "triton", device), expected, 1e-5)


@pytest.mark.parametrize("variant", ["llama-general", "gemma2", "exaone4-window", "starcoder2"])
def test_logits_with_an_fp8_cache(tmp_path, variant, device):
    """Few keys and values round differently; all of them differ from those of plain caches."""
    save_model(tmp_path, variant, num_hidden_layers=2)
    with torch.inference_mode():
        plain = logits(tmp_path, "torch", device)
        expected = logits(tmp_path, "torch", device, fp8_kv=True)
        change = float((expected - plain).norm() / plain.norm())
        assert 1e-4 < change < 0.1
        assert_near(logits(tmp_path, "triton", device, fp8_kv=True), expected, 0.2 * change)


@pytest.mark.parametrize(
    ("form", "tolerance"),
    # Inputs in eight bits may round differently, more of them on a GPU.
    [(awq(32), 1e-5), (fp8_blocks(), 0.08 if CUDA else 0.02)],
    ids=["awq", "fp8 in blocks"],
)
@pytest.mark.parametrize("variant", ["gemma2", "glm4", "starcoder2", "cohere2", "granite"])
def test_logits_of_quantized_models(tmp_path, variant, form, tolerance, device):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    save_quantized(tmp_path, variant, form, **sizes)
    with torch.inference_mode():
        expected = logits(tmp_path, "torch", device)
        assert_near(logits(tmp_path, "triton", device), expected, tolerance)


@pytest.mark.parametrize("form", [awq(32), fp8_blocks(), None], ids=["awq", "fp8 blocks", "mxfp4"])
def test_logits_of_quantized_experts(tmp_path, form, device):
    sizes = {"hidden_size": 128, "num_hidden_layers": 2}
    if form is None:
        save_mxfp4(tmp_path, intermediate_size=96, **sizes)
    else:
        save_quantized_experts(tmp_path, "qwen2-moe", form, **sizes, **EXPERT_SIZES)
    with torch.inference_mode():
        expected = logits(tmp_path, "torch", device)
        assert_near(
            logits(tmp_path, "triton", device),
            expected,
            0.05 if form is not None and form.config["quant_method"] == "fp8" else 1e-5,
        )
