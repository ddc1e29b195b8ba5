"""A worker with `--batch-invariant` refuses models without one order of addition."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.pooling import PoolingConfig
from pagewire.worker.model.quantization.scheme import Quantization
from pagewire.worker.startup import loading
from pagewire.worker.startup.loading import load_worker
from pagewire.worker.startup.one_answer import check_one_answer
from support.models.latent_variants import LATENT_VARIANTS
from support.models.tiny_models import VARIANTS, save_model

GPU = torch.device("cuda")
LENGTH = 512
# The unsupported part of each refused variant. All other variants are of Llama's form.
REFUSED = {
    "llama-general": "the activation gelu",
    "mistral-window": "a sliding window of 24 tokens, less than --max-model-len",
    "ministral": "a sliding window of 24 tokens",
    "qwen2-window": "a sliding window of 24 tokens",
    "glm4": "norms behind attention or the MLP",
    "olmo2": "norms behind attention or the MLP",
    "exaone4": "norms behind attention or the MLP",
    "exaone4-window": "a sliding window of 24 tokens",
    "olmo3": "a sliding window of 24 tokens",
    "starcoder2": "LayerNorm",
    "ernie-biased": "biases of the MLP",
    "cohere": "LayerNorm",
    "cohere2": "a sliding window of 24 tokens",
    "gemma": r"norms of 1 \+ weight",
    "gemma2": "a sliding window of 24 tokens",
    **dict.fromkeys(
        (
            "phi3",
            "phi3-longrope",
            "granite",
            "granite-4",
            "smollm3",
            "glm",
            "exaone",
            "seed-oss",
            "ernie",
        ),
        "layers that were not compared by bits",
    ),
    "gemma3": "a sliding window of 24 tokens",
    **dict.fromkeys(LATENT_VARIANTS, "latent attention"),
}
TAKEN = {
    "llama", "llama-tied", "llama-biased", "llama-rope3", "llama-linear", "llama-dynamic",
    "llama-yarn", "mistral", "qwen2", "qwen3", "qwen3-tied",
}  # fmt: skip
EXPERTS = VARIANTS.keys() - REFUSED.keys() - TAKEN


def check(folder: Path, pooling: PoolingConfig | None = None, **changes: Any) -> None:
    model = replace(read_model_config(folder), **changes)
    check_one_answer(model, pooling, "triton", GPU, LENGTH)


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_taken_or_refused_by_what_they_have(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    if variant in TAKEN:
        check(tmp_path)
        return
    family = read_model_config(tmp_path).family
    part = "experts" if variant in EXPERTS else REFUSED[variant]
    with pytest.raises(
        SetupError, match=f"for {family} with {part}.*: .*; leave --batch-invariant out"
    ):
        check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"quantization": Quantization("fp8", ())}, "quantized weights"),
        ({"attention_soft_cap": 30.0}, "a soft cap of attention scores"),
        ({"logit_soft_cap": 30.0}, "a soft cap of logits"),
        ({"block": "parallel"}, "attention beside the MLP"),
        ({"qk_norm": "projection"}, "norms of whole queries and keys"),
        ({"activation": "gelu_tanh"}, "the activation gelu_tanh"),
        ({"gated": False}, "an MLP without a gate"),
        ({"hidden_size": 200}, "sizes that are not multiples of 16"),
        ({"intermediate_size": 264}, "sizes that are not multiples of 16"),
    ],
)
def test_each_part_that_is_not_of_llamas_form_is_named(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    save_model(tmp_path, "llama")
    with pytest.raises(SetupError, match=f"for llama with {part}: .*leave --batch-invariant out"):
        check(tmp_path, **changes)


def test_a_window_that_no_sequence_exceeds_is_none(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral-window", sliding_window=LENGTH)
    check(tmp_path)
    save_model(tmp_path, "mistral-window", sliding_window=LENGTH - 1)
    with pytest.raises(SetupError, match="a sliding window of 511 tokens"):
        check(tmp_path)


@pytest.mark.parametrize("task", ["embed", "score"])
def test_models_that_pool_are_refused(tmp_path: Path, task: Any) -> None:
    save_model(tmp_path, "llama")
    with pytest.raises(SetupError, match=f"is {task}: leave --batch-invariant out"):
        check(tmp_path, PoolingConfig(task, "last", "normalize"))


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("qwen2-moe", {}, "for qwen2_moe with experts"),
        ("gemma2", {}, "for gemma2 with a sliding window of 24 tokens"),
        ("starcoder2", {}, "for starcoder2 with LayerNorm"),
        ("llama", {"task": "embed"}, "the task of this one is embed"),
    ],
)
def test_a_worker_refuses_before_it_loads_anything(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("operations were loaded")

    save_model(tmp_path, variant)
    monkeypatch.setattr(loading, "choose_ops", lambda name, device: "triton")
    monkeypatch.setattr(loading, "load_ops", never)
    config = WorkerConfig(model=str(tmp_path), device="cpu", batch_invariant=True, **settings)
    with pytest.raises(SetupError, match=message):
        load_worker(config)
