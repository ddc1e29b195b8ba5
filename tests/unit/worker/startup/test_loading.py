"""Loading a worker: blocks by memory, automatic settings, dummy weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.startup.loading import choose_device, choose_dtype, choose_ops, load_worker
from support.models.tiny_models import save_model


def test_blocks_follow_from_the_bytes_on_a_cpu(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    # 2 (K, V) * 3 layers * 2 KV heads * 16 tokens * 16 values * 4 bytes
    block = 2 * 3 * 2 * 16 * 16 * 4
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", cpu_kv_bytes=50 * block + 5, torch_threads=1
    )
    loaded = load_worker(settings)
    assert loaded.limits.num_blocks == 50
    assert loaded.backend.kv_cache_bytes == 50 * block
    assert loaded.limits.max_num_batched_tokens == 2048
    with pytest.raises(SetupError, match="holds 32 tokens"):
        load_worker(replace(settings, num_blocks=3, max_model_len=33))


def test_auto_settings_of_a_cpu(model: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    assert choose_dtype("auto", replace(model, dtype="bfloat16"), cpu) == torch.float32
    assert choose_dtype("auto", replace(model, dtype="bfloat16"), torch.device("cuda")) == (
        torch.bfloat16
    )
    assert choose_dtype("float16", model, cpu) == torch.float16
    assert choose_ops("auto", cpu) == "torch"
    with pytest.raises(SetupError, match="needs an NVIDIA GPU"):
        choose_ops("triton", cpu)
    with pytest.raises(SetupError, match="cuda:99"):
        choose_device("cuda:99")
    with pytest.raises(SetupError, match="teapot"):
        choose_device("teapot")


def test_a_cpu_does_not_take_the_mode_of_one_answer(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    settings = WorkerConfig(model=str(tmp_path), device="cpu", batch_invariant=True)
    with pytest.raises(SetupError, match="--batch-invariant needs the triton operations"):
        load_worker(settings)


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_config_alone_is_enough_for_dummy_weights(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path / "full", variant, initializer_range=0.02)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=40, torch_threads=1
    )
    loaded = load_worker(settings)
    loaded.backend.warm_up()
    assert loaded.dtype == "float32"
    assert loaded.limits.max_model_len == 512


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_tiles_are_tuned_on_a_gpu_only(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    settings = WorkerConfig(model=str(tmp_path), device="cpu", tune_experts=True)
    with pytest.raises(SetupError, match=r"--tune-experts needs .* with torch: leave it out"):
        load_worker(settings)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_model(tmp_path, "mistral")
    return read_model_config(tmp_path)


def test_float32_is_not_tf32_though_the_environment_allows_it(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    torch.set_float32_matmul_precision("high")  # as by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    load_worker(WorkerConfig(model=str(tmp_path), device="cpu", num_blocks=40, torch_threads=1))
    assert torch.get_float32_matmul_precision() == "highest"
