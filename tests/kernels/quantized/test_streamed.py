"""The products of FP8 weights with few tokens, streamed on Hopper, against the plain kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagewire.worker.model.quantization.quantizer import scaled_weight
from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import is_hopper
from pagewire.worker.ops.triton.quantized import linear, scaled
from pagewire.worker.ops.triton.quantized.tiles import Tiles
from pagewire.worker.ops.triton.rowwise import quantize
from pagewire.worker.ops.triton.rowwise.activation import silu_mul
from pagewire.worker.ops.triton.streamed import scaled as streamed
from pagewire.worker.ops.triton.streamed import scaled_choice
from pagewire.worker.ops.triton.streamed.scaled_config import (
    MAX_TOKENS,
    ScaledStream,
    filled,
    fits,
    scaled_stream,
)
from support.kernels.comparison import CUDA, assert_near, poisoned_outputs

EPS = 1e-5
FUSED_TOLERANCE = 0.01  # single inputs differ by one step, which is 6 % of an input
FP8 = torch.float8_e4m3fn
PLAIN = Tiles(rows=64, tokens=16, warps=4, stages=2)
TOKENS = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64]
# K, weight rows: columns and rows that fill the last tiles only in part.
SHAPES = [(4096, 6144), (128, 16), (640, 4144), (2048, 208), (14336, 352)]
on_hopper = pytest.mark.skipif(
    not CUDA or not is_hopper(torch.device("cuda", 0)), reason="a kernel for GPUs of sm_90"
)


def configs(tokens: int, rows: int, k: int) -> list[ScaledStream]:
    """Tiles of all kinds of heights."""
    tried = [scaled_stream(tokens, rows, k), scaled_stream(tokens, rows, k, gated=True)]
    tried += [
        filled(16, tokens, k, 2),
        filled(64, tokens, k, 4),
        filled(48, tokens, k, 4),
        filled(24, tokens, k, 2),
        ScaledStream(8, max(8, filled(8, tokens, k).tokens), 3, 2, registers=128),
    ]
    return [config for config in tried if fits(config, k)]


def drawn(
    tokens: int, k: int, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ScaledWeight, torch.Tensor, torch.Tensor]:
    """A drawn input, weight, bias and residual."""
    torch.manual_seed(tokens + k + rows)
    x, bias, residual = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((tokens, k), (rows,), (tokens, rows))
    )
    weight = scaled_weight(torch.randn(rows, k, device=device) / k**0.5, (1, k), FP8)
    return x, weight, bias, residual


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "rows"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_are_those_of_the_plain_kernel(tokens, k, rows, dtype, device):
    x, weight, bias, residual = drawn(tokens, k, rows, dtype, device)
    static = replace(weight, input_scale=torch.full((1,), 0.02, device=device))
    for given in (weight, static):
        numbers = quantize.quantize(x, given.input_format)
        plain = scaled.scaled_linear(numbers, given, tiles=PLAIN)
        biased = scaled.scaled_linear(numbers, given, bias, tiles=PLAIN)
        added = scaled.scaled_linear_add(numbers, given, residual.clone(), tiles=PLAIN)
        for config in configs(tokens, rows, k):
            for expected, extra in ((plain, None), (biased, bias)):
                out = torch.full_like(residual, torch.nan)
                streamed.multiply(numbers, given, out, extra, config=config)
                assert torch.equal(out, expected), config
            stream = residual.clone()
            streamed.multiply(numbers, given, stream, add=True, config=config)
            assert torch.equal(stream, added), config
            if config.rows % 16 == 0:
                inner = torch.full_like(residual[:, : rows // 2], torch.nan).contiguous()
                streamed.multiply(numbers, given, inner, gated=True, config=config)
                assert torch.equal(inner, silu_mul(plain)), config


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("k", "rows"), SHAPES)
def test_programs_quantize_one_token(k, rows, static, dtype, device):
    """As the kernel that only quantizes, except for values between two steps."""
    x, weight, bias, residual = drawn(1, k, rows, dtype, device)
    if static:
        weight = replace(weight, input_scale=torch.full((1,), 0.02, device=device))
    norm = torch.randn(k, device=device).to(dtype)
    formats = weight.input_format
    whole = quantize.quantize(x, formats)
    for config in (filled(height, 1, k, 2, own=True) for height in (16, 48, 64)):
        stream = residual.clone()
        streamed.multiply_token(x, weight, stream, add=True, config=config)
        expected = scaled.scaled_linear_add(whole, weight, residual.clone())
        assert torch.equal(stream, expected), config
        for norm_weight in (None, norm):
            normed = quantize.norm_quantize(x, norm_weight, EPS, formats)
            both = scaled.scaled_linear(normed, weight)
            how = {"norm": True, "norm_weight": norm_weight, "eps": EPS, "config": config}
            out = torch.full_like(residual, torch.nan)
            streamed.multiply_token(x, weight, out, bias, **how)
            assert_near(out, scaled.scaled_linear(normed, weight, bias), FUSED_TOLERANCE)
            inner = torch.full_like(residual[:, : rows // 2], torch.nan).contiguous()
            streamed.multiply_token(x, weight, inner, gated=True, **how)
            assert_near(inner, silu_mul(both), FUSED_TOLERANCE)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("own", [False, True])
def test_workers_use_the_choice(tokens, own, device, monkeypatch):
    hidden, width = 512, 768
    tile = scaled_choice.Tile(64, 32, 2, own and tokens == 1)
    shapes = ((width, hidden), (hidden, width), (2 * width, hidden))
    use(monkeypatch, dict.fromkeys(shapes, (tile,)), range(0))
    residual, gate_up, _, _ = drawn(tokens, hidden, 2 * width, torch.bfloat16, device)
    norm = torch.randn(hidden, device=device).bfloat16()
    _, qkv, bias, _ = drawn(1, hidden, width, torch.bfloat16, device)
    inner, down, _, _ = drawn(tokens, width, hidden, torch.bfloat16, device)
    operations = {
        "norm": lambda: linear.norm_quantize_linear(residual, norm, EPS, qkv, bias),
        "add": lambda: linear.quantize_linear_add(inner, down, residual.clone()),
        "mlp": lambda: linear.norm_quantize_swiglu_add(residual.clone(), norm, EPS, gate_up, down),
    }
    with poisoned_outputs():
        found = {name: operation() for name, operation in operations.items()}
    use(monkeypatch, {}, range(0))
    for name, operation in operations.items():
        assert_near(found[name], operation(), FUSED_TOLERANCE)


def meta_weight(rows: int, k: int, block: tuple[int, int] | None = None) -> ScaledWeight:
    values = torch.empty(rows, k, dtype=FP8, device="meta")
    block = block or (1, k)
    shape = -(-rows // block[0]), -(-k // block[1])
    return ScaledWeight(values, torch.empty(shape, device="meta"), block, None)


def test_what_is_supported(monkeypatch):
    monkeypatch.setattr(streamed, "is_hopper", lambda device: True)
    dtype = torch.bfloat16
    assert streamed.is_supported(1, meta_weight(16, 128), dtype)
    assert streamed.is_supported(MAX_TOKENS, meta_weight(6144, 4096), dtype)
    assert not streamed.is_supported(0, meta_weight(16, 128), dtype)
    assert not streamed.is_supported(MAX_TOKENS + 1, meta_weight(16, 128), dtype)
    assert not streamed.is_supported(2, meta_weight(24, 128), dtype)
    assert not streamed.is_supported(2, meta_weight(16, 192), dtype)
    assert not streamed.is_supported(2, meta_weight(16, 128), torch.float32)
    assert not streamed.is_supported(2, meta_weight(256, 256, (128, 128)), dtype)


def test_other_columns_are_refused():
    weight = meta_weight(64, 192)
    values = torch.empty(2, 192, dtype=FP8, device="meta")
    x = QuantizedInput(values, torch.empty(2, 1, device="meta"), torch.bfloat16)
    out = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match="multiple of 128"):
        streamed.multiply(x, weight, out, config=ScaledStream(16, 8, 2))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [128, 640, 2048, 4096, 14336, 53248])
@pytest.mark.parametrize("rows", [16, 128, 1024, 5120, 6144, 28672, 151936])
def test_the_rule_chooses_tiles_that_fit(rows, k, gated):
    for tokens in range(1, MAX_TOKENS + 1):
        config = scaled_stream(tokens, rows, k, gated=gated)
        assert fits(config, k, gated=gated), config
        assert config.tokens >= tokens


def test_rows_are_shared_equally_by_multiprocessors():
    assert scaled_stream(1, 6144, 4096).rows == 48
    assert scaled_stream(1, 4096, 4096).rows == 32
    assert scaled_stream(1, 28672, 4096, gated=True).rows == 32


def test_the_measured_tiles_fit():
    for (rows, k), tiles in scaled_choice.MEASURED.items():
        most = [tile.tokens for tile in tiles]
        assert most == sorted(set(most))
        assert most[-1] == MAX_TOKENS
        for tokens in range(1, MAX_TOKENS + 1):
            config = scaled_choice.choose(tokens, rows, k, 132)
            assert config is not None
            assert fits(config, k)
            assert config.tokens >= tokens
            assert tokens == 1 or not config.own


def test_the_choice_by_tokens(monkeypatch):
    tiles = (scaled_choice.Tile(1, 32, own=True), scaled_choice.Tile(16, 48, 2))
    use(monkeypatch, {(4096, 4096): tiles}, range(8, 33))
    chosen = [scaled_choice.choose(tokens, 4096, 4096, 132) for tokens in (1, 16, 17, 33)]
    one, few = filled(32, 1, 4096, own=True), filled(48, 16, 4096, 2)
    assert chosen == [one, few, scaled_stream(17, 4096, 4096), None]
    assert scaled_choice.choose(1, 6144, 4096, 132) is None
    assert scaled_choice.choose(8, 6144, 4096, 132) == scaled_stream(8, 6144, 4096)


def use(
    monkeypatch: pytest.MonkeyPatch,
    measured: dict[tuple[int, int], tuple[scaled_choice.Tile, ...]],
    streamed_tokens: range,
) -> None:
    """Replaces the table and the rule's numbers of tokens."""
    monkeypatch.setattr(scaled_choice, "MEASURED", measured)
    monkeypatch.setattr(scaled_choice, "STREAMED", streamed_tokens)
    scaled_choice.choose.cache_clear()


@pytest.fixture(autouse=True)
def _own_choices() -> Iterator[None]:
    """The choices of one test are not those of the next."""
    yield
    scaled_choice.choose.cache_clear()
