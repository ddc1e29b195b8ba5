"""Weights in four bits in the order of Hopper's tensor cores, and the kernels that read them."""

from dataclasses import replace

import pytest
import torch

from pagewire.worker.model.quantization.packing import unpack_runs
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import GroupedScheme
from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.reference import quantized as reference
from pagewire.worker.ops.triton.quantized import (
    exchange,
    fragment_gemm,
    fragment_vector,
    grouped,
    linear,
)
from pagewire.worker.ops.triton.quantized.fragment_gemm import Plan
from pagewire.worker.ops.triton.quantized.fragments import LINE, arrange, is_supported, magic
from pagewire.worker.ops.triton.quantized.matrices import widen
from pagewire.worker.ops.triton.quantized.tiles import Tiles
from support.kernels.comparison import DTYPES, FULL_SIZE, TOLERANCE, assert_near

HALVES = (torch.bfloat16, torch.float16)
# Numbers of tokens around the sizes of tiles, and between them.
MIDDLE = (65, 96, 97, 129, 136, 145, 160, 161, 192, 193, 255, 256, 300, 400, 500, 700, 1000)
PLAIN = Tiles(rows=64, tokens=16, warps=4, stages=2)
on_a_gpu = pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")


def name_of(shape: fragment_gemm.Shape) -> str:
    return f"{shape.rows}x{shape.tokens}x{shape.stages}"


def four_bits(
    features: int, k: int, dtype: torch.dtype, device: torch.device, *, symmetric: bool = False
) -> GroupedWeight:
    torch.manual_seed(features + k)
    wide = torch.randn(features, k, device=device) / k**0.5
    weight = quantize_weight(wide, GroupedScheme(4, RUN, symmetric, False), dtype)
    assert isinstance(weight, GroupedWeight)
    return weight


def arranged_copy(weight: GroupedWeight) -> GroupedWeight:
    return arrange(replace(weight, values=weight.values.clone()))


def test_words_have_the_columns_of_a_thread(device):
    weight = four_bits(80, 2 * RUN, torch.bfloat16, device)
    columns = unpack_runs(weight.values, 2 * RUN)
    words = arranged_copy(weight).values.view(torch.int32).view(2, 2, 64, 4, 4).long()
    words = words.transpose(1, 2).flatten(0, 1)[:80]  # [features, runs, threads, words]
    for far, near, neighbour in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)):
        nibbles = words >> (4 * far + 8 * near + 16 * neighbour) & 15
        for thread in range(4):
            for word in range(4):
                column = 64 * far + 16 * word + 8 * near + 2 * thread + neighbour
                expected = columns[:, column::RUN].long()
                assert torch.equal(nibbles[:, :, thread, word], expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_pairs_have_scales_and_what_stands_for_zero(symmetric, dtype, device):
    weight = four_bits(80, 3 * RUN, dtype, device, symmetric=symmetric)
    pairs = arranged_copy(weight).pairs
    assert pairs is not None
    assert pairs.shape == (2, 3, 64 // LINE, LINE)
    rows = pairs.flatten(2).transpose(1, 2).flatten(0, 1)[:80]  # [features, groups]
    scales, middles = rows.contiguous().view(dtype).view(80, 3, 2).unbind(-1)
    assert torch.equal(scales, weight.scales)
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
    assert torch.equal(middles.float() - magic(dtype), zeros.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_stays_the_same(dtype, device):
    half = torch.float16 if dtype == torch.float32 else dtype
    weight = four_bits(70, 4 * RUN, half, device)
    arranged = arranged_copy(weight)
    assert not torch.equal(arranged.values, weight.values)
    assert torch.equal(reference.dequantized(arranged), reference.dequantized(weight))
    wide = widen(arranged, dtype)
    assert torch.equal(wide, reference.dequantized(weight).to(dtype))
    assert torch.equal(wide, widen(weight, dtype))


@on_a_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_matrix_has_the_bits_that_registers_have(symmetric, dtype, device):
    """A token that is 1 in one column and 0 in others has the weights of this column as outputs."""
    weight = four_bits(200, 512, dtype, device, symmetric=symmetric)
    weight.scales[::3] *= -1e-6  # numbers that float16 rounds more
    arranged = arranged_copy(weight)
    out = torch.empty(512, 200, dtype=dtype, device=device)
    fragment_gemm.multiply(torch.eye(512, dtype=dtype, device=device), arranged, out)
    assert torch.equal(out.t(), widen(arranged, dtype))


@pytest.mark.parametrize("dtype", HALVES if FULL_SIZE else [torch.float16])
@pytest.mark.parametrize("ordered", [False, True])
def test_products_of_a_widened_weight(ordered, dtype, device, monkeypatch):
    weight = four_bits(70, 2 * RUN, dtype, device)
    if ordered:
        weight = replace(weight, order=torch.randperm(2 * RUN, device=device).int())
    arranged = arranged_copy(weight)
    monkeypatch.setattr(linear, "WIDEN_ARRANGED_TOKENS", 20)
    monkeypatch.setattr(fragment_gemm, "multiply", None)  # not called
    x, residual = (torch.randn(20, n, device=device).to(dtype) for n in (2 * RUN, 70))
    for bias in (None, residual[0].clone()):
        expected = reference.grouped_linear(x, weight, bias)
        out = torch.full_like(residual, torch.nan)
        assert linear.grouped_linear(x, arranged, bias, out) is out
        assert_near(out, expected, TOLERANCE[dtype])
        assert_near(linear.grouped_linear(x, arranged, bias), expected, TOLERANCE[dtype])
    expected = reference.grouped_linear_add(x, weight, residual.clone())
    assert linear.grouped_linear_add(x, arranged, residual) is residual
    assert_near(residual, expected, 2 * TOLERANCE[dtype])


def test_other_weights_have_no_arrangement(device):
    weight = four_bits(20, 2 * RUN, torch.bfloat16, device)
    assert is_supported(weight)
    assert is_supported(replace(weight, group=2 * RUN, scales=weight.scales[:, :1]))
    others = [
        {"bits": 8},
        {"float4": True},
        {"group": 64},
        {"columns": 2 * RUN - 8},
        {"scales": weight.scales.float()},
    ]
    for other in others:
        assert not is_supported(replace(weight, **other))


@on_a_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("k", "features"), [(4096, 6144), (14336, 1000), (256, 80)])
@pytest.mark.parametrize("shape", fragment_gemm.SHAPES, ids=name_of)
def test_a_shape_has_the_bits_of_the_plain_kernel(shape, k, features, dtype, device):
    """Without parts. Some tokens are past the end of the last tile."""
    weight = four_bits(features, k, dtype, device, symmetric=k == 4096)
    arranged = arranged_copy(weight)
    for tokens in (2, shape.tokens, 2 * shape.tokens + 5):
        x, residual = (torch.randn(tokens, n, device=device).to(dtype) for n in (k, features))
        for bias in (None, residual[0].clone()):
            out = torch.full_like(residual, torch.nan)
            fragment_gemm.multiply(x, arranged, out, bias, plan=Plan(shape))
            assert torch.equal(out, grouped.grouped_linear(x, weight, bias, tiles=PLAIN))
        stream = residual.clone()
        fragment_gemm.multiply(x, arranged, stream, add=True, plan=Plan(shape))
        expected = grouped.grouped_linear_add(x, weight, residual.clone(), tiles=PLAIN)
        assert torch.equal(stream, expected)


@on_a_gpu
@pytest.mark.parametrize("tokens", MIDDLE)
@pytest.mark.parametrize("shape", fragment_gemm.SHAPES, ids=name_of)
def test_a_shape_with_and_without_parts(shape, tokens, device):
    weight = four_bits(1088, 1024, torch.bfloat16, device)
    arranged = arranged_copy(weight)
    x, residual = (torch.randn(tokens, n, device=device).bfloat16() for n in (1024, 1088))
    expected = grouped.grouped_linear_add(x, weight, residual.clone(), tiles=PLAIN)
    shared = min(Plan(shape).tiles(tokens, 1088), 30)
    for plan in (Plan(shape), Plan(shape, shared, 4)):
        stream = residual.clone()
        fragment_gemm.multiply(x, arranged, stream, add=True, plan=plan)
        assert_near(stream, expected, 2 * TOLERANCE[torch.bfloat16])
    assert not exchange.shared_sums(x.device)[1].any()


@on_a_gpu
@pytest.mark.parametrize(("shared", "parts"), [(4, 2), (4, 6), (3, 5), (32, 3)])
@pytest.mark.parametrize("shape", fragment_gemm.SHAPES, ids=name_of)
def test_parts_add_up_to_the_product_each_time(shape, shared, parts, device):
    weight = four_bits(2000, 2048, torch.bfloat16, device)
    arranged = arranged_copy(weight)
    x = torch.randn(shape.tokens + 3, 2048, device=device).bfloat16()  # 32 tiles or more
    plan = Plan(shape, shared, parts)
    expected = reference.grouped_linear(x, weight)
    first = torch.empty_like(expected)
    fragment_gemm.multiply(x, arranged, first, plan=plan)
    assert_near(first, expected, TOLERANCE[torch.bfloat16])
    for _ in range(20):
        out = torch.full_like(expected, torch.nan)
        fragment_gemm.multiply(x, arranged, out, plan=plan)
        assert torch.equal(out, first)
    assert not exchange.shared_sums(x.device)[1].any()


@on_a_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [256, 640, 4096, 14336])
def test_one_token(k, dtype, device):
    weight = four_bits(1000, k, dtype, device)
    arranged = arranged_copy(weight)
    x, residual = (torch.randn(1, n, device=device).to(dtype) for n in (k, 1000))
    for plan in (fragment_vector.Plan(4, 8, 128), fragment_vector.Plan(8, 4, 128)):
        for bias in (None, residual[0].clone()):
            out = torch.full_like(residual, torch.nan)
            fragment_vector.multiply(x, arranged, out, bias, plan=plan)
            assert_near(out, reference.grouped_linear(x, weight, bias), TOLERANCE[dtype])
        stream = residual.clone()
        fragment_vector.multiply(x, arranged, stream, add=True, plan=plan)
        expected = reference.grouped_linear_add(x, weight, residual.clone())
        assert_near(stream, expected, 2 * TOLERANCE[dtype])


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 2, 33, 128, 700])
def test_inputs_at_odd_addresses(tokens, device):
    weight = four_bits(320, 512, torch.bfloat16, device)
    x = torch.randn(tokens, 515, device=device).bfloat16()[:, 3:]
    out = linear.grouped_linear(x, arranged_copy(weight))
    assert_near(out, reference.grouped_linear(x, weight), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ("tokens", "features", "k", "expected"),
    [
        (8, 4096, 4096, (1, 8, 64, 3)),
        (64, 28672, 4096, (2, 64, 0, 1)),
        (128, 4096, 14336, (1, 128, 64, 2)),
        (145, 28672, 4096, (2, 160, 0, 1)),
        (192, 4096, 4096, (1, 96, 0, 1)),
        (256, 28672, 4096, (2, 256, 0, 1)),
        (2048, 6144, 4096, (2, 256, 0, 1)),
    ],
)
def test_plans_fill_the_multiprocessors(tokens, features, k, expected):
    plan = fragment_gemm.choose(tokens, features, k, 132)
    shape = plan.shape
    assert (shape.consumers, shape.tokens, plan.shared, plan.parts) == expected


@pytest.mark.parametrize("tokens", [2, 65, 145, 256, 300, 700, 2048])
@pytest.mark.parametrize("features", [128, 4096, 6144, 28672])
@pytest.mark.parametrize("shape", fragment_gemm.SHAPES, ids=name_of)
def test_parts_fit_the_last_round(shape, features, tokens):
    for plan in fragment_gemm.plans(shape, tokens, features, 32, 132):
        tiles = plan.tiles(tokens, features)
        assert (tiles - plan.shared) % (132 * shape.programs) == 0 or not plan.shared
        assert plan.shared * plan.parts <= 132 * shape.programs
        assert (plan.shared > 0) == (plan.parts > 1)


def test_calls_without_parts_have_a_plan():
    for tokens in (2, 145):
        assert fragment_gemm.choose(tokens, 4096, 14336, 132).shared
        assert not fragment_gemm.choose(tokens, 4096, 14336, 132, whole=True).shared


def test_sums_of_parts_have_room():
    """For every shape, with its largest number of programs."""
    device = torch.device("meta")
    sums, flags = exchange.shared_sums(device)
    for shape in fragment_gemm.SHAPES:
        programs = fragment_gemm.multiprocessors(device) * shape.programs
        assert programs * shape.rows * shape.tokens <= sums.numel()
        assert programs * 4 * shape.consumers <= flags.numel()
