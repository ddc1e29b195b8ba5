"""Experts: their config.json, the loading of their weights, and their layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import (
    FAMILIES,
    ModelConfig,
    parse_model_config,
    read_model_config,
)
from pagewire.worker.model.expert_mlp import ExpertMlp
from pagewire.worker.model.weights import LayerWeights, Weights, empty_weights
from pagewire.worker.ops import load_ops
from support.models.tiny_models import save_model

CPU = torch.device("cpu")
# Qwen3-30B-A3B.
LARGE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def config(**changes: Any) -> ModelConfig:
    return parse_model_config({**LARGE, **changes})


def load(folder: Path) -> Weights:
    return load_weights(folder, read_model_config(folder), torch.float32, CPU)


def test_a_large_model_has_as_many_parameters_as_that_of_transformers() -> None:
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE))
    ours = empty_weights(config(), torch.bfloat16, torch.device("meta"))
    assert ours.nbytes == 2 * sum(p.numel() for p in theirs.parameters()) == 61_064_245_248
    layer = ours.layers[47]
    assert (layer.gate_up.shape, layer.down.shape) == ((128, 1536, 2048), (128, 2048, 768))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "eeee"),
        ({"decoder_sparse_step": 2}, ".e.e"),
        ({"mlp_only_layers": [0, 3]}, ".ee."),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "...e"),
        ({"mlp_only_layers": None}, "eeee"),
    ],
)
def test_some_layers_have_no_experts(changes: dict[str, Any], layers: str) -> None:
    model = config(num_hidden_layers=4, **changes)
    assert model.experts is not None
    assert model.experts.layers == tuple(letter == "e" for letter in layers)
    sampled = model.sample_layers()
    assert sampled[-1] == 3
    assert {layers[layer] for layer in sampled[:-1]} == {*layers[:3]}
    fewer = model.with_layers(sampled).experts
    assert fewer is not None
    assert fewer.layers == tuple(layers[layer] == "e" for layer in sampled)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, ["num_experts is 0", "positive integer"]),
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok 129", "128"]),
        ({"num_local_experts": 64}, ["num_experts 128", "num_local_experts 64", "remove"]),
        ({"moe_intermediate_size": "768"}, ["moe_intermediate_size is '768'"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step is 0"]),
        ({"mlp_only_layers": 3}, ["mlp_only_layers is 3", "list of layers"]),
        ({"mlp_only_layers": ["3"]}, ["mlp_only_layers is ['3']"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"use_sliding_window": True}, ["use_sliding_window is True", "only False"]),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        config(**changes)
    assert all(word in str(error.value) for word in words), error.value


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 64,
    "n_group": 8,
    "topk_group": 4,
}


def test_groups_of_experts_and_dense_first_layers() -> None:
    changes = {"num_hidden_layers": 4, "first_k_dense_replace": 3, "n_shared_experts": 2}
    experts = config(**GLM, **changes).experts
    assert experts is not None
    assert (experts.scoring, experts.groups, experts.top_groups) == ("sigmoid", 8, 4)
    assert (experts.shared_size, experts.shared_gate) == (2 * 768, False)
    assert experts.layers == (False, False, False, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 7}, ["n_group 7", "64 experts"]),
        ({"n_group": 64}, ["n_group 64", "64 experts"]),
        ({"topk_group": 9}, ["topk_group 9", "n_group 8"]),
        ({"topk_group": 1, "num_experts_per_tok": 9}, ["topk_group 1", "num_experts_per_tok"]),
        ({"first_k_dense_replace": -1}, ["first_k_dense_replace is -1"]),
        ({"routed_scaling_factor": 0}, ["routed_scaling_factor is 0"]),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        config(**{**GLM, **changes})
    assert all(word in str(error.value) for word in words), error.value


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    save_model(tmp_path, "glm4-moe")
    before = [*load(tmp_path).tensors()]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(map(torch.equal, before, load(tmp_path).tensors()))
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"model\.layers\.2\.eh_proj\.weight has no place"):
        load(tmp_path)


def test_clipped_queries_are_refused() -> None:
    with pytest.raises(SetupError, match=r"clip_qkv is 8.0; only None is supported for Olmoe"):
        config(architectures=["OlmoeForCausalLM"], clip_qkv=8.0)


def test_families_with_experts_have_one_norm_before_them() -> None:
    """`ExpertMlp` has no other form."""
    forms = {(f.block, f.norm, f.norm_bias, f.mlp_bias, f.gated) for f in FAMILIES if f.experts}
    assert forms == {("pre", "rms", False, False, True)}


@pytest.mark.parametrize("variant", ["qwen2-moe", "mixtral", "granite-moe"])
def test_weights_of_experts_are_fused_in_order(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, variant)
    scale = 0.6 if variant == "granite-moe" else 1.0  # its residual_multiplier
    for source, layer in zip(model.model.layers, load(tmp_path).layers, strict=True):
        block = source.block_sparse_moe if variant == "granite-moe" else source.mlp
        router = block.router if variant == "granite-moe" else block.gate
        assert torch.equal(layer.gate_up, block.experts.gate_up_proj)
        assert torch.equal(layer.down, block.experts.down_proj * scale)
        assert layer.router is not None
        assert torch.equal(layer.router, router.weight)
        assert layer.post_norm is not None
        assert torch.equal(layer.post_norm, source.post_attention_layernorm.weight)
        assert (layer.shared_gate_up is None) == (variant != "qwen2-moe")


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-moe")
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    rewrite(tmp_path, name, None)
    with pytest.raises(SetupError, match=rf"{name} \[40, 64\] is missing"):
        load(tmp_path)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(tmp_path, name, torch.ones(64, 100))
    with pytest.raises(SetupError, match=rf"{name} has shape \[64, 100\].*\[64, 112\]"):
        load(tmp_path)


def test_an_expert_that_config_json_does_not_count_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "olmoe")
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_experts": 6', '"num_experts": 5'))
    with pytest.raises(SetupError, match=r"layers\.0\.mlp\.gate\.weight|experts\.5\."):
        load(tmp_path)


def run_mlp(name: str, config: ModelConfig, weights: LayerWeights, residual: Tensor) -> Tensor:
    """The residual stream after the MLP of a layer."""
    assert config.experts is not None
    ops, changed = load_ops("triton" if name == "triton" else "torch"), residual.clone()
    ExpertMlp(config, config.experts, ops).add(weights, changed)
    return changed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen2-moe", "granite-moe", "glm4-moe"])
def test_kernels_compute_the_layer_of_the_reference(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    config, layer = read_model_config(tmp_path), load(tmp_path).layers[1]
    torch.manual_seed(0)
    for tokens in (1, 33):
        residual = torch.randn(tokens, config.hidden_size)
        found, expected = (run_mlp(name, config, layer, residual) for name in ("triton", "torch"))
        assert float((found - expected).norm() / (expected - residual).norm()) < 1e-5
