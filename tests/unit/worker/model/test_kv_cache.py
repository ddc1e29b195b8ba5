"""The paged KV cache: zeros at the start, copies, and values that are not finite."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.kv_cache import KVCache, block_bytes, empty_cache
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_bytes_of_a_block_are_those_of_the_cache(
    model: ModelConfig, dtype: torch.dtype, fp8: bool
) -> None:
    model = replace(model, fp8_kv=fp8)
    size = block_bytes(model, 48, dtype)
    # 3 layers, 2 heads of 32 values, keys and values, and a float32 for each vector in FP8.
    assert size == 2 * 3 * 2 * 48 * ((32 + 4) if fp8 else 32 * dtype.itemsize)
    cache = empty_cache(model, 5, 48, dtype, torch.device("cpu"))
    assert cache.nbytes == 5 * size


@pytest.fixture
def fp8_cache(model: ModelConfig) -> KVCache:
    """A cache in FP8 with random finite values."""
    model = replace(model, fp8_kv=True)
    cache = empty_cache(model, 60, 16, torch.bfloat16, torch.device("cpu"))
    for keys, values, scales in zip(cache.keys, cache.values, cache.scales, strict=True):
        assert scales is not None
        for numbers, of_numbers in ((keys, scales.keys), (values, scales.values)):
            assert numbers.shape == (60, 2, 16, 32)
            assert of_numbers.shape == (60, 2, 16)
            assert numbers.dtype == torch.float8_e4m3fn
            assert not numbers.float().any()
            assert not of_numbers.any()
            numbers.copy_(torch.randn(numbers.shape).to(numbers.dtype))
            of_numbers.copy_(torch.rand(of_numbers.shape))
    return cache


def test_scrub_makes_numbers_and_scales_in_fp8_finite(fp8_cache: KVCache) -> None:
    nan, scales = torch.tensor(torch.nan).to(torch.float8_e4m3fn), fp8_cache.scales
    assert scales[1] is not None
    assert scales[2] is not None
    fp8_cache.keys[1][2, 0, 5, 7] = nan
    fp8_cache.values[2][3, 1, 0, 0] = -nan.float()
    scales[1].keys[2, 1, 4] = torch.nan
    scales[2].values[3, 0, 15] = torch.inf
    scales[2].values[1, 0, 15] = torch.nan  # in a block not named
    before = [storage.clone() for storage in fp8_cache.storages]
    fp8_cache.scrub(torch.tensor([2, 3], dtype=torch.int32))
    assert (fp8_cache.keys[1][2, 0, 5, 7].float(), scales[1].keys[2, 1, 4]) == (0, 0)
    assert (fp8_cache.values[2][3, 1, 0, 0].float(), scales[2].values[3, 0, 15]) == (0, 0)
    assert scales[2].values[1, 0, 15].isnan()
    changed = [(a != b).sum() for a, b in zip(fp8_cache.storages, before, strict=True)]
    assert changed == [2, 3], "a NaN differs from itself"


def test_copies_take_scales_along(fp8_cache: KVCache) -> None:
    scales = fp8_cache.scales[1]
    assert scales is not None
    fp8_cache.keys[1][3, 1, 15, 0] = torch.nan
    scales.values[4, 0, 2] = torch.inf
    before = [storage.clone() for storage in fp8_cache.storages]
    sources = torch.arange(1, 24, dtype=torch.int32)
    targets = torch.randperm(30).int()[:23] + 25
    fp8_cache.copy(sources, targets)
    assert fp8_cache.keys[1][targets[2], 1, 15, 0].float() == 0
    assert scales.values[targets[3], 0, 2] == 0
    fp8_cache.keys[1][targets[2], 1, 15, 0] = torch.nan
    scales.values[targets[3], 0, 2] = torch.inf
    rest = [block for block in range(60) if block not in targets.tolist()]
    for storage, old in zip(fp8_cache.storages, before, strict=True):
        assert storage[:, targets].equal(old[:, sources])
        assert storage[:, rest].equal(old[:, rest])
