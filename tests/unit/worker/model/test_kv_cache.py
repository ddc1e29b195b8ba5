"""The paged KV cache: zeros at the start, copies, and values that are not finite."""

from pathlib import Path

import pytest
import torch

from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.kv_cache import empty_cache
from support.models.tiny_models import save_model


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_model(tmp_path, "mistral")
    return read_model_config(tmp_path)


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
