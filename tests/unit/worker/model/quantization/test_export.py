"""Folders that `pagewire quantize` writes, as transformers with compressed-tensors reads them."""

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization import export
from pagewire.worker.quantizing.folder import quantize_folder
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.tiny_models import save_model, save_vision_model

PROMPT = [(11 * i) % 199 for i in range(40)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
TARGETS = ["fp8", "int8", "int4"]


def their_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def stored(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """The type and shape of each tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, a safetensors file does not iterate
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied", "phi3", "glm4", "gemma2"])
@pytest.mark.parametrize("target", TARGETS)
def test_transformers_computes_the_same(tmp_path: Path, target: str, variant: str) -> None:
    """With the code of compressed-tensors, which does not quantize inputs once it has unpacked."""
    assert target in ("fp8", "int8", "int4")
    save_model(tmp_path / "plain", variant, **SIZES)
    quantize_folder(tmp_path / "plain", tmp_path / "small", target, 64)
    plain = prompt_logits(load_decoder(tmp_path / "plain", torch.float32, 40), PROMPT)
    ours = prompt_logits(load_decoder(tmp_path / "small", torch.float32, 40), PROMPT)
    theirs = their_logits(tmp_path / "small")
    assert error([theirs], [plain]) > 1e-3  # they are quantized
    inputs = {"fp8": 0.1, "int8": 0.05, "int4": 1e-4}[target]
    assert error([ours], [theirs]) < inputs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["qwen3-moe-mixed", "qwen2-moe", "mixtral"])
def test_experts(tmp_path: Path, target: str, variant: str) -> None:
    """Routers and gates of shared experts stay plain, and the configuration lists them."""
    assert target in ("fp8", "int8", "int4")
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    save_model(tmp_path / "plain", variant, **SIZES, **({} if variant == "mixtral" else sizes))
    quantize_folder(tmp_path / "plain", tmp_path / "small", target, 64)
    plain = prompt_logits(load_decoder(tmp_path / "plain", torch.float32, 40), PROMPT)
    ours = prompt_logits(load_decoder(tmp_path / "small", torch.float32, 40), PROMPT)
    assert 1e-3 < error([ours], [plain]) < (0.5 if target == "int4" else 0.2)
    ignored = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    kept = [name for name, (_, shape) in stored(tmp_path / "small").items() if "mlp.gate." in name]
    for name in kept:
        assert any(
            re.match(text.removeprefix("re:"), name.removesuffix(".weight"))
            for text in ignored["ignore"]
        )


@pytest.mark.parametrize("target", TARGETS)
def test_names_that_only_checkpoints_have(tmp_path: Path, target: str) -> None:
    assert target in ("fp8", "int8", "int4")
    save_model(tmp_path / "plain", "exaone", **SIZES)
    before, after = quantize_folder(tmp_path / "plain", tmp_path / "small", target, 64)
    assert after < (0.35 if target == "int4" else 0.5) * before
    plain = prompt_logits(load_decoder(tmp_path / "plain", torch.float32, 40), PROMPT)
    ours = prompt_logits(load_decoder(tmp_path / "small", torch.float32, 40), PROMPT)
    assert 1e-3 < error([ours], [plain]) < (0.5 if target == "int4" else 0.1)


@pytest.mark.parametrize("target", TARGETS)
def test_the_configuration_is_that_of_the_library(tmp_path: Path, target: str) -> None:
    assert target in ("fp8", "int8", "int4")
    save_model(tmp_path / "plain", "llama", **SIZES)
    quantize_folder(tmp_path / "plain", tmp_path / "small", target, 64)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    found = QuantizationConfig.model_validate(config["quantization_config"])
    assert found.quantization_status == "compressed"
    assert found.ignore == ["lm_head"]
    scheme = found.config_groups["group_0"]
    assert scheme.weights.num_bits == (4 if target == "int4" else 8)
    tensors = stored(tmp_path / "small")
    layer = "model.layers.0.mlp.down_proj"
    if target == "int4":
        assert tensors[f"{layer}.weight_packed"] == ("I32", [128, 32])
        assert tensors[f"{layer}.weight_scale"] == ("F32", [128, 4])
        assert tensors[f"{layer}.weight_shape"] == ("I64", [2])
    else:
        kind = "F8_E4M3" if target == "fp8" else "I8"
        assert tensors[f"{layer}.weight"] == (kind, [128, 256])
        assert tensors[f"{layer}.weight_scale"] == ("F32", [128, 1])
    assert tensors["lm_head.weight"][0] == "F32"


def test_shards_keep_their_names_and_other_files_are_copied(tmp_path: Path) -> None:
    source, output = tmp_path / "plain", tmp_path / "small"
    save_model(source, "llama", shard="300KB", **SIZES)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"plain weights")
    before, after = quantize_folder(source, output, "int4", 32)
    assert after < before / 2
    shards = {path.name for path in source.glob("*.safetensors")}
    assert len(shards) > 2
    assert {path.name for path in output.glob("*.safetensors")} == shards
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(output).keys()
    assert (output / "tokenizer.json").read_text() == "{}"
    assert not (output / "pytorch_model.bin").exists()
    assert prompt_logits(load_decoder(output, torch.float32, 40), PROMPT).isfinite().all()


def test_a_tensor_that_two_shards_have_is_written_once(tmp_path: Path) -> None:
    source, output = tmp_path / "plain", tmp_path / "small"
    save_model(source, "llama", shard="300KB", **SIZES)
    quantize_folder(source, tmp_path / "expected", "int4", 32)
    first, *_, last = sorted(source.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(name for name in tensors if name.endswith("_proj.weight"))
    # The index names the first file for it, so the other values are never read.
    save_file({**load_file(last), name: 3 * tensors[name]}, last, metadata={"format": "pt"})
    quantize_folder(source, output, "int4", 32)
    for path in (tmp_path / "expected").glob("*.safetensors"):
        assert (output / path.name).read_bytes() == path.read_bytes()
    index = "model.safetensors.index.json"
    assert (output / index).read_text() == (tmp_path / "expected" / index).read_text()


def test_a_tied_head_is_not_written(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "llama-tied", **SIZES)
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **head}, path, metadata={"format": "pt"})
    quantize_folder(tmp_path / "plain", tmp_path / "small", "fp8", 128)
    assert not head.keys() & stored(tmp_path / "small").keys()
    assert "model.embed_tokens.weight" in stored(tmp_path / "small")
    assert their_logits(tmp_path / "small").isfinite().all()


def test_a_folder_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "plain", "llama", shard="300KB", **SIZES)
    written = []

    def fail_at_the_second(tensors: dict[str, Tensor], path: Path, **_: object) -> None:
        written.append(path)
        assert not (tmp_path / "small").exists()
        if len(written) == 2:
            raise OSError("No space left on device")
        path.touch()

    monkeypatch.setattr(export, "save_file", fail_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "fp8", 128)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "plain", "llama", **SIZES)

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(SetupError, match=r"small cannot be written: .*No space left.*make room"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "fp8", 128)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_broken_link_is_not_replaced(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "llama", **SIZES)
    (tmp_path / "small").symlink_to(tmp_path / "absent")
    with pytest.raises(SetupError, match="small exists"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "fp8", 128)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "llama")  # with 112 inputs of one layer
    with pytest.raises(SetupError, match=r"down_proj has 112 inputs.*--group-size that divides"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 32)
    assert not (tmp_path / "small").exists()
    quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 16)
    with pytest.raises(SetupError, match="small exists"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int8", 128)
    save_model(tmp_path / "experts", "granite-moe")
    with pytest.raises(
        SetupError, match=r"quantized to int8: experts that are one tensor .* granit"
    ):
        quantize_folder(tmp_path / "experts", tmp_path / "again", "int8", 128)
    save_vision_model(tmp_path / "seeing", "gemma3")
    with pytest.raises(SetupError, match=r"gemma3 have parts that are not text.* --quantization"):
        quantize_folder(tmp_path / "seeing", tmp_path / "again", "int8", 128)
    with pytest.raises(SetupError, match="quantized already, by compressed-tensors"):
        quantize_folder(tmp_path / "small", tmp_path / "again", "int8", 128)
