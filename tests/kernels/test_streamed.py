"""The tiles of GEMMs of few tokens on Hopper; `invariant/test_stream_bits.py` runs the kernel."""

from __future__ import annotations

import pytest
import torch

from pagewire.worker.ops.triton import linear
from pagewire.worker.ops.triton.linear_config import VectorConfig
from pagewire.worker.ops.triton.streamed import gemm
from pagewire.worker.ops.triton.streamed.config import (
    MAX_TOKENS,
    MAX_TOKENS_OF_SMALL,
    StreamConfig,
    stream_config,
    streams,
)

SHARED_BYTES = 227 * 1024  # of a program on Hopper
ROWS_OF_AN_INSTRUCTION = 64


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [64, 576, 896, 1024, 2880, 4096, 14336, 53248])
@pytest.mark.parametrize("rows", [16, 128, 1024, 1152, 4096, 28672, 151936])
def test_tiles_fit_into_shared_memory(rows: int, k: int, gated: bool) -> None:
    for tokens in range(1, MAX_TOKENS_OF_SMALL + 1):
        config = stream_config(tokens, rows, k, gated)
        assert config.tokens >= tokens
        assert config.stages >= 2
        assert config.rows >= (16 if gated else 8)
        tiles = config.stages * config.tiles * (config.rows + config.tokens)
        behind = ROWS_OF_AN_INSTRUCTION - config.rows
        assert 128 * (tiles + behind) + 1024 <= SHARED_BYTES


def test_large_weights_of_many_tokens_are_left_to_cublas() -> None:
    assert streams(1, 128_256, 4096)
    assert streams(MAX_TOKENS, 128_256, 4096)
    assert not streams(MAX_TOKENS + 1, 4096, 4096)
    assert streams(MAX_TOKENS_OF_SMALL, 4096, 1024)
    assert not streams(MAX_TOKENS_OF_SMALL + 1, 4096, 1024)
    assert not streams(0, 4096, 1024)


def test_hopper_takes_these_tiles_but_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")

    def chosen(tokens: int) -> object:
        return linear.choose_config(weight.new_empty(tokens, 1024), weight)

    assert not isinstance(chosen(16), StreamConfig)
    monkeypatch.setattr(gemm, "is_hopper", lambda device: True)
    assert isinstance(chosen(1), VectorConfig)
    assert isinstance(chosen(linear.MAX_VECTOR_TOKENS), VectorConfig)
    assert isinstance(chosen(16), StreamConfig)
    assert chosen(65) is None
    assert not gemm.is_supported(16, weight.float())
    assert not gemm.is_supported(16, weight[:, :1000])
    assert not gemm.is_supported(16, weight[:1000])
