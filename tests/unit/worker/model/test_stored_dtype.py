"""Without a data type in config.json, the type of the weights applies."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.config.stored_dtype import stored_dtype

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write(folder: Path, stored: torch.dtype, **config: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = {"positions": torch.zeros(2, dtype=torch.int64), "w": torch.zeros(2, dtype=stored)}
    save_file(tensors, folder / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_type_of_the_weights_is_taken(tmp_path: Path, name: str) -> None:
    write(tmp_path, getattr(torch, name))
    assert read_model_config(tmp_path).dtype == name


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_comes_first(tmp_path: Path, key: str) -> None:
    write(tmp_path, torch.float16, **{key: "bfloat16"})
    assert read_model_config(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"oops"]
)
def test_a_broken_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert stored_dtype(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(content)
    assert stored_dtype(tmp_path) is None
    assert read_model_config(tmp_path).dtype == "float32"
