"""The inputs of a model's layers, compared with those in transformers, and whole folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagewire.models import EMBEDDED, resolve_model
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.stacks import layer_name, layer_stacks
from pagewire.worker.quantizing.calibration import LENGTH, layer_inputs, read_sequences
from pagewire.worker.quantizing.folder import quantize_folder
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.tiny_models import save_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
SEQUENCES = [[(7 * i) % 199 for i in range(40)], [(5 * i + 3) % 199 for i in range(25)]]
TEXT = (
    "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n"
    "Once upon a time there was a fox who lived at the edge of a wood. Every morning the fox "
    "went to the river to drink.<|im_end|>\n<|im_start|>user\nWhat is seven plus five?<|im_end|>\n"
    "<|im_start|>assistant\nSeven plus five is twelve.<|im_end|>\n"
)


def squares_of_theirs(folder: Path) -> dict[str, Tensor]:
    """`x.T @ x` of each linear layer, by its name, with the code of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, Tensor] = {}

    def record(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2)
        found[name] = found.get(name, 0) + rows.t() @ rows

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(torch.tensor([sequence]))
    return found


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied", "gemma2", "phi3", "granite"])
def test_inputs_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path / "plain", variant, **SIZES)
    quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 64)
    theirs = squares_of_theirs(tmp_path / "small")
    config, compared = read_model_config(tmp_path / "plain"), 0
    for number, squares in enumerate(layer_inputs(tmp_path / "small", SEQUENCES)):
        stacks = layer_stacks(config, number)
        assert squares.keys() == stacks.keys()
        for matrix, stack in stacks.items():
            for name in stack.names:
                expected = theirs[f"{layer_name(config, number)}{name}"]
                assert (squares[matrix] - expected).norm() < 1e-3 * expected.norm()
                compared += 1
    assert compared == len(theirs)


@pytest.mark.parametrize("target", ["fp8", "int8", "int4"])
def test_a_calibrated_folder_is_closer_to_the_plain_model(tmp_path: Path, target: str) -> None:
    plain = tmp_path / "plain"
    save_model(plain, "llama", **SIZES, vocab_size=8192, shard="1MB")
    source = resolve_model(EMBEDDED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((source / name).read_bytes())
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT * 10)
    quantize_folder(plain, tmp_path / "nearest", target, 64)
    quantize_folder(plain, tmp_path / "calibrated", target, 64, texts)
    assert {path.name for path in tmp_path.iterdir()} == {
        "plain", "nearest", "calibrated", "texts.txt"
    }  # fmt: skip
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    logits = [
        prompt_logits(load_decoder(tmp_path / name, torch.float32, len(ids)), ids)
        for name in ("plain", "nearest", "calibrated")
    ]
    assert error([logits[2]], [logits[0]]) < 0.95 * error([logits[1]], [logits[0]])
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("nearest", "calibrated")
    ]
    assert configs[0] == configs[1]


def test_texts_become_sequences(tmp_path: Path) -> None:
    texts, folder = tmp_path / "texts.txt", resolve_model(EMBEDDED)
    texts.write_text(TEXT * 30)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT * 30).ids
    found = read_sequences(texts, folder, 4096, 4096)
    assert [len(sequence) for sequence in found[:-1]] == [LENGTH] * (len(found) - 1)
    assert sum(found, []) == ids  # noqa: RUF017, a few lists
    assert max(map(len, read_sequences(texts, folder, 100, 4096))) == 100


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "llama", **SIZES, vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / name).write_bytes((resolve_model(EMBEDDED) / name).read_bytes())
    file = tmp_path / "plain" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.post_attention_layernorm.weight"].fill_(torch.inf)
    save_file(weights, file, {"format": "pt"})
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT)
    with pytest.raises(SetupError, match=r"inputs of model\.layers\.1\.mlp.* are not finite"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 64, texts)
    assert not (tmp_path / "small").exists()


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "llama", **SIZES)
    absent, empty = tmp_path / "absent.txt", tmp_path / "empty.txt"
    empty.touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SetupError, match=r"--calibrate .*absent\.txt: .*No such file"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 64, absent)
    with pytest.raises(SetupError, match=r"--calibrate .*binary: .*utf-8"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 64, tmp_path / "binary")
    with pytest.raises(SetupError, match=r"--calibrate .*has no tokenizer"):
        quantize_folder(tmp_path / "plain", tmp_path / "small", "int4", 64, empty)
    with pytest.raises(SetupError, match=r"empty\.txt: the file is empty"):
        read_sequences(empty, resolve_model(EMBEDDED), 100, 4096)
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT)
    with pytest.raises(SetupError, match=r"into the id \d+, which is outside .* of 199 ids"):
        read_sequences(texts, resolve_model(EMBEDDED), 100, 199)
    save_model(tmp_path / "experts", "mixtral", **SIZES)
    with pytest.raises(SetupError, match=r"--calibrate is for dense models, and mixtral has"):
        quantize_folder(tmp_path / "experts", tmp_path / "small", "int4", 64, empty)
    assert not (tmp_path / "small").exists()
