"""The linear kernels for few tokens against their references."""

from functools import partial

import pytest
import torch

from pagewire.worker.ops.reference import linear as reference
from pagewire.worker.ops.triton import linear
from pagewire.worker.ops.triton.linear_config import (
    TABLE,
    SkinnyConfig,
    VectorConfig,
    linear_config,
)
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near, poisoned_outputs

EPS = 1e-5
# tokens, k, features, config: odd features, a ragged and several tiles of k.
CASES = [
    (1, 96, 33, VectorConfig(rows=2, block_k=128, warps=1)),
    (1, 96, 50, VectorConfig(rows=4, block_k=32, warps=2)),
    (1, 200, 16, VectorConfig(rows=2, block_k=64, warps=1)),
    (3, 200, 33, VectorConfig(rows=2, block_k=256, warps=1)),
    (1, 128, 40, SkinnyConfig(rows=16, block_k=64, warps=2, stages=3)),
    (3, 128, 40, SkinnyConfig(rows=16, block_k=32, warps=2, stages=3)),
    (17, 64, 100, SkinnyConfig(rows=64, block_k=64, warps=4, stages=2)),
]
if FULL_SIZE:
    CASES += [
        (1, 1024, 4096, VectorConfig(rows=4, block_k=1024, warps=1)),
        (1, 3072, 1024, VectorConfig(rows=2, block_k=4096, warps=4)),
        (1, 14336, 4096, VectorConfig(rows=2, block_k=2048, warps=4)),
        (4, 3072, 1024, VectorConfig(rows=2, block_k=4096, warps=8)),
        (8, 1024, 4096, VectorConfig(rows=4, block_k=1024, warps=2)),
        (8, 4096, 6144, SkinnyConfig(rows=16, block_k=256, warps=2, stages=4)),
        (16, 2048, 1000, SkinnyConfig(rows=64, block_k=128, warps=4, stages=4)),
        (40, 14336, 4096, SkinnyConfig(rows=128, block_k=64, warps=4, stages=5)),
    ]
# Fused kernels multiply by the unnormalized input and round once; references round several times.
FUSED_TOLERANCE = {dtype: 2 * tolerance for dtype, tolerance in TOLERANCE.items()}


class Inputs:
    """Random inputs of one case; weights are scaled so that outputs are near 1."""

    def __init__(self, tokens: int, k: int, features: int, dtype: torch.dtype, device) -> None:
        torch.manual_seed(tokens + k + features)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        self.x = draw(tokens, k).to(dtype)
        self.norm = draw(k).to(dtype)
        self.weight = (draw(features, k) / k**0.5).to(dtype)
        self.gate_up = (draw(2 * features, k) / k**0.5).to(dtype)
        self.bias = draw(features).to(dtype)
        self.residual = draw(tokens, features).to(dtype)


def on_cpu(function, *arguments):
    """Run a reference on the CPU, without the GEMMs of cuBLAS."""
    out = function(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments))
    return out.to(arguments[0].device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "features", "config"), CASES)
class TestAgainstReference:
    def test_linear(self, tokens, k, features, config, dtype, device):
        a = Inputs(tokens, k, features, dtype, device)
        for bias in (None, a.bias):
            with poisoned_outputs():
                out = linear.linear(a.x, a.weight, bias, config=config)
            assert_near(out, on_cpu(reference.linear, a.x, a.weight, bias), TOLERANCE[dtype])

    def test_norm_linear(self, tokens, k, features, config, dtype, device):
        a = Inputs(tokens, k, features, dtype, device)
        for bias in (None, a.bias):
            with poisoned_outputs():
                out = linear.norm_linear(a.x, a.norm, EPS, a.weight, bias, config=config)
            expected = on_cpu(reference.norm_linear, a.x, a.norm, EPS, a.weight, bias)
            assert_near(out, expected, FUSED_TOLERANCE[dtype])

    def test_linear_add(self, tokens, k, features, config, dtype, device):
        a = Inputs(tokens, k, features, dtype, device)
        stream = a.residual.clone()
        out = linear.linear_add(a.x, a.weight, stream, config=config)
        assert out is stream
        expected = on_cpu(reference.linear_add, a.x, a.weight, a.residual)
        assert_near(stream, expected, FUSED_TOLERANCE[dtype])

    def test_norm_gate_up_silu_mul(self, tokens, k, features, config, dtype, device):
        a = Inputs(tokens, k, features, dtype, device)
        with poisoned_outputs():
            out = linear.norm_gate_up_silu_mul(a.x, a.norm, EPS, a.gate_up, config=config)
        expected = on_cpu(reference.norm_gate_up_silu_mul, a.x, a.norm, EPS, a.gate_up)
        assert_near(out, expected, 2 * FUSED_TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_dispatch_computes_the_same(tokens, device):
    """For every choice of the table, shapes without an entry, and folded norms."""
    dtype = DTYPES[0]
    a = Inputs(tokens, 96, 48, dtype, device)
    tolerance = 2 * FUSED_TOLERANCE[dtype]
    assert_near(linear.linear(a.x, a.weight), reference.linear(a.x, a.weight), tolerance)
    out = linear.norm_linear(a.x, a.norm, EPS, a.weight, a.bias)
    expected = reference.norm_linear(a.x, a.norm, EPS, a.weight, a.bias)
    assert_near(out, expected, tolerance)
    for norm in (a.norm, None):
        out = linear.norm_linear(a.x, norm, EPS, a.weight)
        assert_near(out, reference.norm_linear(a.x, norm, EPS, a.weight), tolerance)
        out = linear.norm_gate_up_silu_mul(a.x, norm, EPS, a.gate_up)
        expected = reference.norm_gate_up_silu_mul(a.x, norm, EPS, a.gate_up)
        assert_near(out, expected, tolerance)
    expected = reference.linear_add(a.x, a.weight, a.residual.clone())
    assert_near(linear.linear_add(a.x, a.weight, a.residual), expected, tolerance)


@pytest.mark.parametrize("config", [*dict.fromkeys(config for *_, config in CASES[:6]), None])
def test_output_is_written_to_out(config, device):
    a = Inputs(1 if isinstance(config, VectorConfig) else 3, 128, 40, DTYPES[0], device)
    for bias in (None, a.bias):
        expected = reference.norm_linear(a.x, a.norm, EPS, a.weight, bias)
        for norm_linear in (
            partial(linear.norm_linear, config=config),
            reference.norm_linear,
        ):
            whole = torch.zeros(5, 40, dtype=a.x.dtype, device=device)
            out = whole[: len(a.x)]
            assert norm_linear(a.x, a.norm, EPS, a.weight, bias, out=out) is out
            assert_near(out, expected, FUSED_TOLERANCE[a.x.dtype])
            assert not whole[len(a.x) :].any()


def test_tables_fit_their_shapes():
    for (rows, k), entries in TABLE.items():
        for tokens, config in entries.items():
            assert rows % config.rows == 0
            assert linear_config(tokens, rows, k, item_size=2) is config
            if isinstance(config, SkinnyConfig):
                assert k % config.block_k == 0
            else:
                assert tokens == 1 or config.block_k >= k


def test_only_tabled_token_counts_take_the_vector_kernel():
    """Each number of tokens is compiled separately, which must not happen while serving."""
    assert isinstance(linear_config(4, 1024, 2048, item_size=2), VectorConfig)
    assert linear_config(3, 1024, 2048, item_size=2) is None
    assert isinstance(linear_config(9, 1024, 2048, item_size=2), SkinnyConfig)
    assert linear_config(65, 1024, 2048, item_size=2) is None
    assert linear_config(4, 1024, 2048, item_size=4) is None
    assert linear_config(2, 1000, 2048, item_size=2) is None
