"""Plain weights that are quantized while they are loaded."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.quantization.config import online_quantization
from pagewire.worker.ops.contract.quantized import ScaledWeight
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.tiny_models import save_model

CPU = torch.device("cpu")
# Norms after attention and MLP enlarge the outputs of small weights, and so their errors.
ENLARGING = ("olmo2", "exaone4", "gemma2", "gemma3")
PROMPT = [(11 * i) % 199 for i in range(40)]
# Layers of 1.4 MB in bfloat16 and a small vocabulary: as in a large model, the layers weigh most.
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 10,
    "initializer_range": 0.02,
}


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "llama-tied", "qwen3", "phi3", "granite", "glm4", "exaone", "starcoder2"),
        *("ernie", "cohere", "gemma", "llama-general", *ENLARGING),
    ],
)
@pytest.mark.parametrize(("kind", "largest"), [("fp8", 0.1), ("int8", 0.03)])
def test_logits_are_near_those_of_plain_weights(
    tmp_path: Path, variant: str, kind: str, largest: float
) -> None:
    save_model(tmp_path, variant, hidden_size=128, intermediate_size=256, initializer_range=0.02)
    assert kind in ("fp8", "int8")
    model = read_model_config(tmp_path)
    online = replace(model, quantization=online_quantization(kind))
    decoder = load_decoder(tmp_path, torch.float32, 40, online)
    found = prompt_logits(decoder, PROMPT)
    exact = prompt_logits(load_decoder(tmp_path, torch.float32, 40), PROMPT)
    most = 1.6 * largest if variant in ENLARGING else largest
    assert 1e-4 < error([found], [exact]) < most
    assert isinstance(decoder.weights.layers[0].gate_up, ScaledWeight)
    assert isinstance(decoder.weights.head, Tensor)


def test_the_weights_of_single_files_and_shards_are_equal(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "llama")
    save_model(tmp_path / "many", "llama", shard="60KB")
    loaded = []
    for name in ("one", "many"):
        model = read_model_config(tmp_path / name)
        online = replace(model, quantization=online_quantization("int8"))
        loaded.append(load_weights(tmp_path / name, online, torch.float32, CPU))
    for one, other in zip(loaded[0].tensors(), loaded[1].tensors(), strict=True):
        assert torch.equal(one, other)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, but not of files that are mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, out)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known or storage.filename is not None:
            return

        def forget() -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.finalize(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def test_memory_stays_below_that_of_plain_weights(tmp_path: Path) -> None:
    """At its peak, all tensors of a load together are smaller than the plain weights."""
    save_model(tmp_path, "llama", **LARGE).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = read_model_config(tmp_path)
    online = replace(plain, quantization=online_quantization("fp8"))
    with LiveBytes() as memory:
        unquantized = load_weights(tmp_path, plain, torch.bfloat16, CPU).nbytes
    assert unquantized <= memory.peak  # the measurement does include the weights
    with LiveBytes() as memory:
        weights = load_weights(tmp_path, online, torch.bfloat16, CPU)
    assert weights.nbytes < 0.6 * unquantized
    assert weights.nbytes <= memory.peak < 0.9 * unquantized
