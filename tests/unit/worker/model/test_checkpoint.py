"""Loading weights: shards, types, random ones, and errors of all kinds in a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.weights import Weights
from support.models.tiny_models import save_model, served_bytes

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, read_model_config(folder), dtype, CPU)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_projections_are_fused_in_order_and_hold_the_norms(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3")
    weights = load(tmp_path)
    source, layer = model.model.layers[1], weights.layers[1]
    attention, mlp = source.self_attn, source.mlp
    before, behind = source.input_layernorm.weight, source.post_attention_layernorm.weight
    assert not torch.equal(before, behind)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(layer.qkv, torch.cat([p.weight for p in projections]) * before)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(layer.gate_up, gate_up * behind)
    assert layer.input_norm is None
    assert layer.post_norm is None
    assert torch.equal(weights.head, model.lm_head.weight)
    assert weights.nbytes == served_bytes(model)


def test_tied_head_is_the_embedding_and_counted_once(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen2")
    weights = load(tmp_path)
    assert weights.head is weights.embedding
    assert weights.nbytes == served_bytes(model)


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "llama")
    save_model(tmp_path / "many", "llama", shard="60KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    pairs = zip(load(tmp_path / "one").tensors(), load(tmp_path / "many").tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_of_two_shards_with_a_tensor_the_index_decides(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "llama")
    save_model(tmp_path / "many", "llama", shard="60KB")
    name, index = "model.norm.weight", tmp_path / "many" / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    owner = tmp_path / "many" / written["weight_map"][name]
    others = [path for path in index.parent.glob("model-*.safetensors") if path != owner]
    for path in others:
        tensors = load_file(path)
        save_file({**tensors, name: load_file(owner)[name] + 1}, path)
    pairs = zip(load(tmp_path / "one").tensors(), load(index.parent).tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    del written["weight_map"][name]
    index.write_text(json.dumps(written))
    first, second, *_ = sorted([owner, *others])
    with pytest.raises(SetupError) as refused:
        load(index.parent)
    said = f"tensor {name} is in {first} and in {second}; remove it from one file"
    assert str(refused.value) == said


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_types_are_converted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = save_model(tmp_path, "llama")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})

    rewrite(tmp_path, change)
    weights = load(tmp_path, wanted)
    assert all(tensor.dtype == wanted for tensor in weights.tensors())
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight.to(stored).to(wanted))


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.__delitem__("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(SetupError, match=r"model\.layers\.2\.mlp\.up_proj\.weight \[112, 64\]"):
        load(tmp_path)


def test_wrong_shape_is_named_with_the_wanted_one(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(SetupError, match=r"model\.norm\.weight has shape \[65\].*needs \[64\]"):
        load(tmp_path)


def test_wrong_type_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    ints = torch.ones(64, dtype=torch.int8)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": ints}))
    with pytest.raises(SetupError, match=r"model\.norm\.weight is of type I8.*BF16"):
        load(tmp_path)


def test_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]  # a family without QK norm
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=r"[qk]_norm\.weight has no place"):
        load(tmp_path)


def test_two_names_of_a_tensor_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    other = {"norm.weight": torch.ones(64)}  # as a decoder without a head stores it
    rewrite(tmp_path, lambda tensors: tensors.update(other))
    with pytest.raises(SetupError, match=r"model\.norm\.weight and norm\.weight name the same"):
        load(tmp_path)


def test_derived_tensors_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    derived = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.ones(199, 64),  # tied
    }
    rewrite(tmp_path, lambda tensors: tensors.update(derived))
    assert load(tmp_path).head.std() > 0


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(SetupError, match="only safetensors weights are read"):
        load(tmp_path)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SetupError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", shard="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(SetupError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": ""}}',
        pytest.param(f'{{"weight_map": {{"a": "{"b" * 300}"}}}}', id="a long name"),
    ],
)
def test_broken_index_is_named(tmp_path: Path, index: str) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SetupError, match=r"index\.json .*complete the checkpoint"):
        load(tmp_path)
