"""Sizes: sequence length by window and pool, blocks by memory, rotary angles."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.kv_cache import blocks_in, empty_cache
from pagewire.worker.model.rotary_table import rope_table
from pagewire.worker.ops.contract.blocks import check_block_size
from pagewire.worker.protocol.steps.limits import fit_to_pool, longest_sequence
from pagewire.worker.startup.loading import choose_device, choose_dtype, choose_ops, load_worker
from support.models.tiny_models import VARIANTS, save_model


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_model(tmp_path, "mistral")
    return read_model_config(tmp_path)


def longest(model: ModelConfig, wanted: int | None) -> int:
    return longest_sequence(model.max_position_embeddings, model.sliding_window, wanted)


def test_length_is_what_the_model_was_trained_for(model: ModelConfig) -> None:
    assert longest(model, None) == 512
    assert longest(model, 100) == 100
    with pytest.raises(SetupError, match=r"max_model_len 513.*512"):
        longest(model, 513)


def test_sliding_window_caps_the_length(model: ModelConfig) -> None:
    windowed = replace(model, sliding_window=64)
    assert longest(windowed, None) == 64
    assert longest(windowed, 64) == 64
    with pytest.raises(SetupError, match=r"max_model_len 65 exceeds.*window of 64"):
        longest(windowed, 65)
    assert longest(replace(model, sliding_window=4096), None) == 512


def test_blocks_that_the_kernels_do_not_read_are_refused() -> None:
    check_block_size(8, "torch")
    check_block_size(32, "triton")
    with pytest.raises(SetupError, match=r"block_size 24.*multiple of 16.*--ops torch"):
        check_block_size(24, "triton")


def test_pool_caps_a_length_nobody_asked_for() -> None:
    assert fit_to_pool(512, None, num_blocks=33, block_size=16, block_bytes=1024) == 512
    assert fit_to_pool(512, None, num_blocks=32, block_size=16, block_bytes=1024) == 496


def test_too_small_a_pool_is_refused_with_what_it_takes() -> None:
    with pytest.raises(SetupError, match=r"31 blocks holds 480 tokens.*needs 33 blocks"):
        fit_to_pool(512, 512, num_blocks=31, block_size=16, block_bytes=1024)
    with pytest.raises(SetupError, match=r"1 blocks holds 0 tokens"):
        fit_to_pool(512, None, num_blocks=1, block_size=16, block_bytes=1024)
    with pytest.raises(SetupError, match="cpu-kv-bytes"):
        blocks_in(1500, 1024, "--cpu-kv-bytes")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_starts_as_zeros_of_its_type(model: ModelConfig, dtype: torch.dtype) -> None:
    cache = empty_cache(model, 5, 16, dtype, torch.device("cpu"))
    assert len(cache.keys) == len(cache.values) == 3
    for tensor in (*cache.keys, *cache.values):
        assert tensor.shape == (5, 2, 16, 32)
        assert tensor.dtype == dtype
        assert not tensor.any()


def test_scrub_replaces_only_what_is_not_finite(model: ModelConfig) -> None:
    cache = empty_cache(model, 4, 16, torch.float32, torch.device("cpu"))
    cache.keys[1][:] = 3.0
    cache.keys[1][2, 0, 5, 7] = float("nan")
    cache.values[2][3, 1, 0, 0] = float("-inf")
    cache.keys[0][1, 0, 0, 0] = float("nan")  # in a block not named
    cache.scrub(torch.tensor([2, 3], dtype=torch.int32))
    assert cache.keys[1][2].isfinite().all()
    assert (cache.keys[1] == 3.0).sum() == cache.keys[1].numel() - 1
    assert cache.values[2].isfinite().all()
    assert cache.keys[0][1, 0, 0, 0].isnan()


def test_copies_reach_every_layer_and_nothing_else(model: ModelConfig) -> None:
    cache = empty_cache(model, 60, 16, torch.float32, torch.device("cpu"))
    cache.storage.copy_(torch.randn(cache.storage.shape))
    cache.keys[1][3, 1, 15, 0] = float("nan")
    before = cache.storage.clone()
    sources = torch.arange(1, 24, dtype=torch.int32)
    targets = torch.randperm(30).int()[:23] + 25
    cache.copy(sources, targets)
    for layer in range(3):
        for tensors in (cache.keys, cache.values):
            assert tensors[layer][targets].equal(tensors[layer][sources].nan_to_num())
    rest = [block for block in range(60) if block not in targets.tolist()]
    assert cache.storage[:, rest].nan_to_num().equal(before[:, rest].nan_to_num())


@pytest.mark.parametrize("variant", ["llama", "llama-rope3", "llama-linear", "qwen3"])
def test_rotary_angles_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    hf = save_model(tmp_path, variant)
    config = read_model_config(tmp_path)
    table = rope_table(config.rope, config.head_dim, 300, torch.device("cpu"))
    cos, sin = hf.model.rotary_emb(torch.zeros(1), torch.arange(300)[None])
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-5, rtol=0)


def test_every_rope_kind_is_among_the_variants() -> None:
    kinds = {v[1].get("rope_parameters", {}).get("rope_type") for v in VARIANTS.values()}
    assert kinds == {None, "llama3", "linear"}


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


def test_config_alone_is_enough_for_dummy_weights(tmp_path: Path) -> None:
    save_model(tmp_path / "full", "llama", initializer_range=0.02)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=40, torch_threads=1
    )
    loaded = load_worker(settings)
    loaded.backend.warm_up()
    assert loaded.dtype == "float32"
    assert loaded.limits.max_model_len == 512
