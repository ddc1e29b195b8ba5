"""On Hopper the GEMM of few tokens has the bits of the plain kernel, which the interpreter's tests
compare with plain torch."""

from __future__ import annotations

import pytest
import torch

from pagewire.worker.ops.device import is_hopper
from pagewire.worker.ops.reference import linear as reference
from pagewire.worker.ops.triton.invariant import linear
from pagewire.worker.ops.triton.invariant.linear_config import OrderedConfig
from pagewire.worker.ops.triton.streamed.config import (
    MAX_TOKENS_OF_SMALL,
    StreamConfig,
    stream_config,
)
from support.kernels.comparison import CUDA, TOLERANCE, assert_near, poisoned_outputs

pytestmark = pytest.mark.skipif(
    not CUDA or not is_hopper(torch.device("cuda", 0)), reason="a kernel for GPUs of sm_90"
)
EPS = 1e-5
ORDERED = OrderedConfig(rows=64, block_k=64, tokens=64, warps=4, stages=3)
# k, weight rows: with columns and rows of partial tiles.
SHAPES = [(1024, 2064), (64, 16), (4096, 208), (576, 4144)]
CONFIGS = [StreamConfig(16, 64, 3, 1), StreamConfig(64, 64, 2, 2), StreamConfig(32, 64, 5, 2)]


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, MAX_TOKENS_OF_SMALL])
@pytest.mark.parametrize(("k", "rows"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_are_those_of_the_plain_kernel(dtype, k, rows, tokens, device):
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, weight, bias, residual = draw(tokens, k), draw(rows, k), draw(rows), draw(tokens, rows)
    plain = linear.linear(x, weight, bias, config=ORDERED)
    assert_near(plain, reference.linear(x, weight, bias), TOLERANCE[dtype])
    added = linear.linear_add(x, weight, residual.clone(), config=ORDERED)
    gated = linear.norm_gate_up_silu_mul(x, None, EPS, weight / 8, config=ORDERED)
    for config in (stream_config(tokens, rows, k, gated=True), *CONFIGS):
        with poisoned_outputs():
            assert torch.equal(linear.linear(x, weight, bias, config=config), plain), config
            assert torch.equal(
                linear.linear_add(x, weight, residual.clone(), config=config), added
            ), config
            found = linear.norm_gate_up_silu_mul(x, None, EPS, weight / 8, config=config)
            assert torch.equal(found, gated), config


def test_tiles_of_eight_rows(device):
    x = torch.randn(3, 2048, dtype=torch.bfloat16, device=device)
    weight = torch.randn(500, 2048, dtype=torch.bfloat16, device=device)
    config = StreamConfig(8, 8, 4, 2)
    assert stream_config(3, 500, 2048).rows == config.rows
    found = linear.linear(x, weight, config=config)
    assert torch.equal(found, linear.linear(x, weight, config=ORDERED))
