"""Norms and GEMMs of a token have the same bits with any tiles and any number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from kernels.test_linear import Inputs
from pagewire.worker.ops.reference import linear as reference
from pagewire.worker.ops.reference.activation import silu_mul as reference_silu
from pagewire.worker.ops.reference.norm import inverse_rms as reference_inverse
from pagewire.worker.ops.reference.norm import rms_norm as reference_norm
from pagewire.worker.ops.triton import linear as usual
from pagewire.worker.ops.triton.invariant import activation, linear, norm, ops
from pagewire.worker.ops.triton.invariant.linear_config import (
    OrderedConfig,
    any_tokens,
    few_tokens,
    ordered_config,
)
from pagewire.worker.ops.triton.linear_config import TABLE, VectorConfig
from support.kernels.any_threads import any_threads
from support.kernels.comparison import CUDA, DTYPES, TOLERANCE, assert_near, poisoned_outputs

EPS = 1e-5
TOKENS = 9
# k, features: with and without columns of a partial tile.
SHAPES = [(96, 33), (208, 40)]
CONFIGS = [
    OrderedConfig(rows=16, block_k=32, tokens=8, warps=4, stages=2, ahead=3),
    OrderedConfig(rows=32, block_k=16, tokens=16, warps=4, stages=2),
    OrderedConfig(rows=64, block_k=64, tokens=32, warps=4, stages=3, ahead=2),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with nullcontext() if CUDA else any_threads():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "features"), SHAPES)
class TestBits:
    def test_of_norms(self, k, features, dtype, device):
        a = Inputs(TOKENS, k, features, dtype, device)
        for weight in (a.norm, None):
            with poisoned_outputs():
                together = ops.rms_norm(a.x, weight, EPS)
            assert_near(together, reference_norm(a.x, weight, EPS), TOLERANCE[dtype])
            for token in range(TOKENS):
                alone = ops.rms_norm(a.x[token : token + 1], weight, EPS)
                assert torch.equal(alone[0], together[token])

    def test_of_linear(self, k, features, dtype, device):
        a = Inputs(TOKENS, k, features, dtype, device)
        for bias in (None, a.bias):
            expected = ops.linear(a.x, a.weight, bias)
            assert_near(expected, reference.linear(a.x, a.weight, bias), TOLERANCE[dtype])
            for config in CONFIGS:
                for tokens in (1, 3, TOKENS):
                    with poisoned_outputs():
                        out = linear.linear(a.x[:tokens], a.weight, bias, config=config)
                    assert torch.equal(out, expected[:tokens]), (config, tokens)

    def test_of_norms_before_the_gemm(self, k, features, dtype, device):
        a = Inputs(TOKENS, k, features, dtype, device)
        for weight in (a.norm, None):
            expected = ops.linear(ops.rms_norm(a.x, weight, EPS), a.weight, a.bias)
            for tokens in (1, TOKENS):
                for config in (None, *CONFIGS):
                    out = linear.norm_linear(
                        a.x[:tokens], weight, EPS, a.weight, a.bias, config=config
                    )
                    assert torch.equal(out, expected[:tokens]), (config, tokens)

    def test_of_gates(self, k, features, dtype, device):
        a = Inputs(TOKENS, k, features, dtype, device)
        if dtype != torch.float16:  # the norm is applied after the product
            expected = ops.silu_mul(ops.linear(a.x, a.gate_up), a.x, EPS)
        else:
            expected = ops.silu_mul(ops.linear(ops.rms_norm(a.x, None, EPS), a.gate_up))
        assert_near(
            expected,
            reference.norm_gate_up_silu_mul(a.x, None, EPS, a.gate_up),
            4 * TOLERANCE[dtype],
        )
        for tokens in (1, 4, TOKENS):
            for config in (None, *CONFIGS):
                out = linear.norm_gate_up_silu_mul(
                    a.x[:tokens], None, EPS, a.gate_up, config=config
                )
                assert torch.equal(out, expected[:tokens]), (config, tokens)

    def test_of_norms_applied_by_the_next_kernel(self, k, features, dtype, device):
        """It reads the tokens, or the factors of many tokens."""
        a = Inputs(TOKENS, k, features, dtype, device)
        product = ops.linear(a.x, a.gate_up)
        inverse = norm.inverse_rms(a.x, EPS)
        assert_near(inverse, reference_inverse(a.x, EPS)[:, 0], TOLERANCE[torch.float32])
        expected = ops.silu_mul(product, a.x, EPS)
        assert_near(expected, reference_silu(product, a.x, EPS), TOLERANCE[dtype])
        assert torch.equal(activation.silu_mul(product, inverse=inverse), expected)

    def test_of_sums_with_the_residual(self, k, features, dtype, device):
        a = Inputs(TOKENS, k, features, dtype, device)
        expected = a.residual + ops.linear(a.x, a.weight)
        for tokens in (1, TOKENS):
            for config in (None, *CONFIGS):
                stream = a.residual[:tokens].clone()
                out = linear.linear_add(a.x[:tokens], a.weight, stream, config=config)
                assert out is stream
                assert torch.equal(out, expected[:tokens]), (config, tokens)


def test_an_algorithm_of_cublas_is_used_only_if_it_was_chosen(monkeypatch, device):
    """Only those were compared with the reference order."""
    a = Inputs(70, 96, 48, DTYPES[0], device)
    used = []

    def gemm(x: torch.Tensor, weight: torch.Tensor, out: object) -> torch.Tensor:
        used.append(len(x))
        return x @ weight.t()

    monkeypatch.setattr(linear, "gemm", gemm)
    ops.linear(a.x, a.weight)
    assert used == []
    monkeypatch.setattr(linear, "is_chosen", lambda *_: True)
    ops.linear(a.x, a.weight)
    ops.linear(a.x[:1], a.weight)
    assert used == [70]


def test_tiles_fit_their_shapes():
    for (rows, k), entries in TABLE.items():
        for tokens in range(1, 130):
            config = ordered_config(tokens, rows, k, item_size=2)
            assert (config is None) == (usual.linear_config(tokens, rows, k, item_size=2) is None)
            for found in (config, any_tokens(tokens, k, 2), any_tokens(tokens, k, 4)):
                if found is not None:
                    assert k % found.block_k == 0
                    assert found.ahead * found.block_k <= k
        if isinstance(entries[1], VectorConfig):
            assert ordered_config(1, rows, k, item_size=2) == few_tokens(1, k, 2)


def test_tiles_of_columns_that_no_power_of_two_divides():
    assert few_tokens(1, 24, 2).block_k == any_tokens(300, 24, 2).block_k == 16
    assert few_tokens(1, 24, 2).ahead == 1


@pytest.mark.skipif(CUDA, reason="it shows what the interpreter of this test can find")
def test_the_matrix_vector_kernel_does_depend_on_the_number_of_tokens(device):
    """A negative control: one token uses another kernel there, with another order."""
    a = Inputs(17, 200, 64, torch.float32, device)
    config = OrderedConfig(rows=16, block_k=32, tokens=8, warps=4, stages=2)
    vector = VectorConfig(rows=2, block_k=64, warps=1)
    alone = usual.linear(a.x[:1], a.weight, config=vector)
    assert not torch.equal(alone, linear.linear(a.x, a.weight, config=config)[:1])
