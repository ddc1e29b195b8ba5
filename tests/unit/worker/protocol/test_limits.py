"""The maximum length of a sequence by model and pool; the block size."""

from pathlib import Path

import pytest

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.kv_cache import blocks_in
from pagewire.worker.ops.contract.blocks import check_block_size
from pagewire.worker.protocol.steps.limits import fit_to_pool, kept_window, longest_sequence
from support.models.tiny_models import save_model


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_model(tmp_path, "mistral")
    return read_model_config(tmp_path)


def longest(model: ModelConfig, requested: int | None) -> int:
    return longest_sequence(model.max_position_embeddings, requested)


def test_length_is_what_the_model_was_trained_for(model: ModelConfig) -> None:
    assert longest(model, None) == 512
    assert longest(model, 100) == 100
    with pytest.raises(SetupError, match=r"max_model_len 513.*512"):
        longest(model, 513)


def test_blocks_that_the_kernels_do_not_read_are_refused() -> None:
    check_block_size(8, "torch")
    check_block_size(32, "triton")
    with pytest.raises(SetupError, match=r"block_size 24.*multiple of 16.*--ops torch"):
        check_block_size(24, "triton")


def test_pool_caps_a_length_that_was_not_requested() -> None:
    assert fit_to_pool(512, None, num_blocks=33, block_size=16, block_bytes=1024) == 512
    assert fit_to_pool(512, None, num_blocks=32, block_size=16, block_bytes=1024) == 496


def test_too_small_a_pool_is_refused_with_what_it_takes() -> None:
    with pytest.raises(SetupError, match=r"31 blocks holds 480 tokens.*needs 33 blocks"):
        fit_to_pool(512, 512, num_blocks=31, block_size=16, block_bytes=1024)
    with pytest.raises(SetupError, match=r"1 blocks holds 0 tokens"):
        fit_to_pool(512, None, num_blocks=1, block_size=16, block_bytes=1024)
    with pytest.raises(SetupError, match="cpu-kv-bytes"):
        blocks_in(1500, 1024, "--cpu-kv-bytes")


def test_a_pool_that_holds_a_window_caps_no_length() -> None:
    sizes = {"block_size": 16, "block_bytes": 1024, "window": 33}
    assert fit_to_pool(4096, None, num_blocks=4, **sizes) == 4096
    assert fit_to_pool(4096, 4096, num_blocks=4, **sizes) == 4096
    assert fit_to_pool(4096, None, num_blocks=3, **sizes) == 32
    with pytest.raises(SetupError, match=r"3 blocks holds 32 tokens.*needs 4 blocks"):
        fit_to_pool(4096, 4096, num_blocks=3, **sizes)


def test_blocks_are_given_up_only_behind_the_windows_of_all_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert kept_window([24, 24], longest=512, host_blocks=0) == 24
    assert kept_window([24, 48], longest=512, host_blocks=0) == 48
    assert kept_window([24, None], longest=512, host_blocks=0) == 0
    assert kept_window([24, 512], longest=512, host_blocks=0) == 0, "no sequence exceeds it"
    assert not caplog.text
    assert kept_window([24, 24], longest=512, host_blocks=9) == 0
    assert "--host-memory-gb" in caplog.text
    assert kept_window([24, 24], longest=512, max_drafts=4) == 0
    assert "--speculate" in caplog.text
