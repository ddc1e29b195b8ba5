"""The GEMM of FP8 weights on Hopper against the plain kernel, and the choice of its tiles."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.quantization.quantizer import scaled_weight
from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import multiprocessors
from pagewire.worker.ops.reference import quantized as reference
from pagewire.worker.ops.triton.quantized import choices, exchange, hopper, linear, scaled
from pagewire.worker.ops.triton.quantized.choices import (
    LOW,
    PLAIN,
    SHAPES,
    SMALL,
    TALL,
    THREE,
    Choice,
    choose,
    divide,
    is_shareable,
)
from pagewire.worker.ops.triton.quantized.tiles import Tiles
from pagewire.worker.ops.triton.rowwise.activation import silu_mul
from support.kernels.comparison import FULL_SIZE, assert_near

H200 = 132  # multiprocessors
NEEDS_GPU = pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")
PLAIN_TILES = Tiles(rows=64, tokens=16, warps=4, stages=2)
TOKENS = [2, 65, 129, 145, 192, 193, 256, 257, 300, 384, 449, 512, 1000, 1500]
MATRICES = [(4096, 6144), (14336, 4096), (256, 80)]  # K, features
TRIED = [*SHAPES, replace(SMALL, box=8)]
# An order of the sums changes them by less than the rounding of the products to bfloat16.
PARTS_TOLERANCE = 0.004


def draw(*shape: int, device: torch.device) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device=device)


def product(
    tokens: int, k: int, features: int, device: torch.device
) -> tuple[QuantizedInput, ScaledWeight, Tensor, Tensor]:
    """An input, a weight, a bias and a residual."""
    x, bias = (draw(*shape, device=device).bfloat16() for shape in ((tokens, k), (features,)))
    residual = draw(tokens, features, device=device).bfloat16()
    wide = draw(features, k, device=device) / k**0.5
    weight = scaled_weight(wide, (1, k), torch.float8_e4m3fn)
    return reference.quantize(x, weight.input_format), weight, bias, residual


def shared_choices(tokens: int, features: int, k: int) -> list[Choice]:
    """The choices whose programs share tiles on this GPU."""
    processors = multiprocessors(torch.device("cuda", 0))
    return [
        Choice(shape, parts)
        for shape in TRIED
        for parts in (2, 3, 4)
        if is_shareable(shape, parts, tokens, features, k, processors)
    ]


def multiplied(x, weight, choice: Choice, gated: bool = False, bias: Tensor | None = None):
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.full((len(x.values), features), torch.nan, dtype=x.dtype, device=x.values.device)
    hopper.multiply(x, weight, out, bias, gated=gated, choice=choice)
    return out


@NEEDS_GPU
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("k", "features"), MATRICES)
class TestBits:
    def test_are_those_of_the_plain_kernel(self, tokens, k, features, device):
        x, weight, bias, residual = product(tokens, k, features, device)
        for choice in map(Choice, TRIED):
            for added in (None, bias):
                expected = scaled.scaled_linear(x, weight, added, tiles=PLAIN_TILES)
                assert torch.equal(multiplied(x, weight, choice, bias=added), expected), choice
            stream = residual.clone()
            hopper.multiply(x, weight, stream, add=True, choice=choice)
            expected = scaled.scaled_linear_add(x, weight, residual.clone(), tiles=PLAIN_TILES)
            assert torch.equal(stream, expected), choice
            expected = silu_mul(scaled.scaled_linear(x, weight, tiles=PLAIN_TILES))
            assert torch.equal(multiplied(x, weight, choice, gated=True), expected), choice

    def test_of_shared_tiles_are_the_same_each_time(self, tokens, k, features, device):
        x, weight, bias, residual = product(tokens, k, features, device)
        for choice in shared_choices(tokens, features, k):
            for gated in (False, True):
                first = multiplied(x, weight, choice, gated, bias)
                expected = scaled.scaled_linear(x, weight, bias, tiles=PLAIN_TILES)
                if gated:
                    expected = silu_mul(expected)
                assert_near(first, expected, PARTS_TOLERANCE)
                for _ in range(5):
                    assert torch.equal(multiplied(x, weight, choice, gated, bias), first), choice
            stream = residual.clone()
            hopper.multiply(x, weight, stream, add=True, choice=choice)
            expected = scaled.scaled_linear_add(x, weight, residual.clone(), tiles=PLAIN_TILES)
            assert_near(stream, expected, PARTS_TOLERANCE)
        assert not exchange.shared_sums(x.values.device)[1].any()


@NEEDS_GPU
@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_parts_in_a_graph(shape, device):
    """Each of many launches in a row finds the counters at 0."""
    tokens, k, features = 145, 4096, 4096
    x, weight, _, _ = product(tokens, k, features, device)
    tried = [each for each in shared_choices(tokens, features, k) if each.shape == shape]
    assert tried
    outs = [torch.empty(tokens, features, dtype=x.dtype, device=device) for _ in range(60)]
    expected = [multiplied(x, weight, choice) for choice in tried]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, out in enumerate(outs):
            hopper.multiply(x, weight, out, choice=tried[index % len(tried)])
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    for index, out in enumerate(outs):
        assert torch.equal(out, expected[index % len(tried)])
    assert not exchange.shared_sums(x.values.device)[1].any()


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [65, 145, 512])
def test_only_the_default_products_share_tiles(tokens, device):
    x, weight, _, residual = product(tokens, 14336, 4096, device)
    expected = scaled.scaled_linear(x, weight, tiles=PLAIN_TILES)
    assert torch.equal(scaled.scaled_linear(x, weight), expected)
    assert_near(linear.scaled_linear(x, weight), expected, PARTS_TOLERANCE)
    expected = scaled.scaled_linear_add(x, weight, residual.clone(), tiles=PLAIN_TILES)
    assert torch.equal(scaled.scaled_linear_add(x, weight, residual.clone()), expected)


def test_sums_of_parts_have_room():
    device = torch.device("meta")
    sums, flags = exchange.shared_sums(device)
    processors = multiprocessors(device)
    for shape in SHAPES:
        assert processors * shape.rows * shape.columns <= sums.numel()
        assert processors * shape.consumers <= flags.numel()


@pytest.mark.parametrize("k", [256, 4096, 14336])
@pytest.mark.parametrize("features", [80, 2048, 4096, 6144, 28672])
@pytest.mark.parametrize("tokens", [65, 145, 300, 512, 8192])
class TestSharing:
    """The arithmetic of the kernel, repeated here: programs divide the columns of shared tiles."""

    def test_every_block_has_one_program(self, tokens, features, k):
        blocks = k // choices.BLOCK_K
        for shape in SHAPES:
            for parts in (2, 3, 4):
                if not is_shareable(shape, parts, tokens, features, k, H200):
                    continue
                work = divide(shape, parts, tokens, features, H200)
                sharers = (work.tiles - work.whole) * parts
                assert sharers <= work.programs <= H200
                assert work.whole % work.programs == 0
                blocks_of = [[] for _ in range(work.tiles)]
                for program in range(work.programs):
                    for tile in range(program, work.whole, work.programs):
                        blocks_of[tile] += range(blocks)
                    if program < sharers:
                        part = program % parts
                        columns = range(part * blocks // parts, (part + 1) * blocks // parts)
                        assert columns
                        blocks_of[work.whole + program // parts] += columns
                assert all(each == list(range(blocks)) for each in blocks_of)


def test_every_place_has_one_tile():
    """The order of the tiles, repeated here, is a permutation."""
    for token_tiles in (1, 2, 3, 5, 8, 9, 20):
        for feature_tiles in (1, 7, 48, 224):
            for programs in (5, 132):
                places = {
                    _place(tile, token_tiles, feature_tiles, programs)
                    for tile in range(token_tiles * feature_tiles)
                }
                assert len(places) == token_tiles * feature_tiles


def _place(tile: int, token_tiles: int, feature_tiles: int, programs: int) -> tuple[int, int]:
    group = hopper.GROUP.value
    first = tile // (group * feature_tiles) * group
    height = min(token_tiles - first, group)
    within = tile % (group * feature_tiles)
    feature = within // height
    return first + (within + feature * height // programs) % height, feature


choose_on_h200 = partial(choose, processors=H200)


class TestChoice:
    def test_few_tokens_are_left_to_the_plain_kernel(self):
        for rows, k in ((4096, 4096), (28672, 4096)):
            assert choose_on_h200(2, rows, k) == choose_on_h200(64, rows, k) == PLAIN

    def test_tiles_fit_the_tokens(self, monkeypatch):
        monkeypatch.setattr(choices, "TILES", {})
        choose.cache_clear()
        assert choose_on_h200(192, 28672, 4096).shape in (THREE, TALL)
        assert choose_on_h200(8192, 6144, 4096, shared=False).shape in (TALL, choices.WIDE)
        assert choose_on_h200(512, 4096, 4096, shared=False).shape in (SMALL, LOW, THREE)
        assert choose_on_h200(145, 4096, 14336).parts > 1
        choose.cache_clear()

    def test_entries_hold_up_to_their_tokens(self, monkeypatch):
        found = {192: Choice(THREE, 4), 256: Choice(TALL)}
        monkeypatch.setattr(choices, "TILES", {(640, 1024, False): found})
        choose.cache_clear()
        assert choose_on_h200(64, 640, 1024) == PLAIN
        assert choose_on_h200(145, 640, 1024) == Choice(THREE, 4)
        assert choose_on_h200(192, 640, 1024) == Choice(THREE, 4)
        assert choose_on_h200(193, 640, 1024) == Choice(TALL)
        assert choose_on_h200(145, 640, 1024, shared=False).parts == 1
        assert choose_on_h200(145, 640, 1024, gated=True) != Choice(THREE, 4)
        choose.cache_clear()

    @pytest.mark.parametrize("processors", [16, 78, 114, 132])
    def test_choices_fit_every_gpu(self, processors):
        """Sharers wait for each other, so all of them run at once."""
        for rows, k, gated in choices.TILES:
            for tokens in range(choices.MIN_TOKENS, 1100, 7):
                chosen = choose(tokens, rows, k, processors, gated)
                if chosen.shape is not None:
                    given = chosen.shape, chosen.parts, tokens, rows, k, processors
                    assert is_shareable(*given)

    def test_few_tokens_have_a_separate_activation(self):
        for rows in (28672, 640):
            assert choose_on_h200(choices.MIN_TOKENS - 1, rows, 4096, gated=True) == PLAIN
            assert choose_on_h200(choices.MIN_TOKENS, rows, 4096, gated=True) != PLAIN

    def test_entries_are_possible(self):
        for (rows, k, gated), buckets in choices.TILES.items():
            before = 1
            assert list(buckets) == sorted(buckets)
            for limit in buckets:
                for tokens in {max(before, choices.MIN_TOKENS), limit}:
                    chosen = choose_on_h200(tokens, rows, k, gated=gated)
                    if chosen.shape is not None:
                        assert is_shareable(chosen.shape, chosen.parts, tokens, rows, k, H200)
                before = limit + 1
