"""The Gluon kernels of quantized weights and the products with one token compile for Hopper as
intended, on any machine. Run as a script, this file prints the launches as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.worker.ops.contract.quantized import GroupedWeight, QuantizedInput, ScaledWeight
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
# The residual's addresses of the largest tile, and constants of long rows.
SPILLED_LIMIT = 16
# What a sharer keeps from tile to tile, outside the loop over runs.
PARTS_SPILLED_LIMIT = 40
K, FEATURES = 4096, 6144


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def eight_bits(tokens: int) -> tuple[QuantizedInput, ScaledWeight]:
    fp8, scales = torch.float8_e4m3fn, meta(FEATURES, 1, dtype=torch.float32)
    weight = ScaledWeight(meta(FEATURES, K, dtype=fp8), scales, (1, K), None)
    given = meta(tokens, 1, dtype=torch.float32)
    return QuantizedInput(meta(tokens, K, dtype=fp8), given, torch.bfloat16), weight


def four_bits(k: int = K, dtype: torch.dtype = torch.bfloat16) -> GroupedWeight:
    groups = k // 128
    return GroupedWeight(
        values=meta(FEATURES, k // 2, dtype=torch.uint8),
        scales=meta(FEATURES, groups, dtype=dtype),
        zeros=meta(FEATURES, groups, dtype=torch.uint8),
        order=None,
        bits=4,
        group=128,
        columns=k,
    )


def arranged(k: int = K, dtype: torch.dtype = torch.bfloat16) -> GroupedWeight:
    pairs = meta(FEATURES // 64, k // 128, 8, 8, dtype=torch.int32)
    return replace(four_bits(k, dtype), zeros=None, pairs=pairs)


def scaled(shape: int, parts: int, mode: str) -> None:
    from pagewire.worker.ops.triton.quantized import choices, hopper

    choice, gated = choices.Choice(choices.SHAPES[shape], parts), mode == "gated"
    tokens = choices.SHAPES[shape].rows
    out = meta(tokens, FEATURES // 2 if gated else FEATURES)
    x, weight = eight_bits(tokens)
    hopper.multiply(x, weight, out, add=mode == "add", gated=gated, choice=choice)


def fused(k: int, is_gated: bool, normed: bool) -> None:
    from pagewire.worker.ops.triton.quantized import fused_vector

    scales = meta(FEATURES, 1, dtype=torch.float32)
    weight = ScaledWeight(meta(FEATURES, k, dtype=torch.float8_e4m3fn), scales, (1, k), None)
    out = meta(1, FEATURES // 2 if is_gated else FEATURES)
    norm = {"norm": True, "norm_weight": meta(k)} if normed else {"add": True}
    fused_vector.multiply(meta(1, k), weight, out, gated=is_gated, **norm)


def grouped(shape: int, parts: int, dtype: torch.dtype, add: bool) -> None:
    from pagewire.worker.ops.triton.quantized import fragment_gemm

    chosen = fragment_gemm.SHAPES[shape]
    plan = fragment_gemm.Plan(chosen, parts - 1, parts)
    x, out = (meta(chosen.tokens, width, dtype=dtype) for width in (K, FEATURES))
    weight = arranged(dtype=dtype)
    fragment_gemm.multiply(x, weight, out, plan=plan, add=add)


def vector(bits: int, k: int = K) -> None:
    from pagewire.worker.ops.triton.quantized import linear

    if bits == 8:
        linear.scaled_linear(*eight_bits(1))
    else:
        linear.grouped_linear(meta(1, k), four_bits(k))


def arranged_vector(k: int, dtype: torch.dtype) -> None:
    from pagewire.worker.ops.triton.quantized import linear

    linear.grouped_linear(meta(1, k, dtype=dtype), arranged(k, dtype))


def widened(k: int, dtype: torch.dtype) -> None:
    from pagewire.worker.ops.triton.quantized import matrices

    matrices.widen(arranged(k, dtype), dtype)


SCALED = {
    f"FP8, shape {shape}, {parts} parts, {mode}": (scaled, shape, parts, mode)
    for shape in range(6)
    for parts in (1, 2)
    for mode in ("plain", "add", "gated")
}
FUSED = {
    "quantized token": (fused, 14336, False, False),
    "quantized token, added": (fused, 4096, False, False),
    "quantized token, norm": (fused, 4096, False, True),
    "quantized token, gated": (fused, 4096, True, True),
}
GROUPED = {
    f"4 bits, shape {shape}, {n} parts, {dtype}, add {add}": (grouped, shape, n, dtype, add)
    for shape in range(15)
    for n, dtype, add in (
        (1, torch.bfloat16, False),
        (2, torch.bfloat16, False),
        (2, torch.float16, True),
    )
}
VECTOR = {f"one token, {bits} bits": (vector, bits) for bits in (8, 4)}
ARRANGED = {
    f"one token, 4 bits, {k} columns, {dtype}": (arranged_vector, k, dtype)
    for k in (K, 14336)
    for dtype in (torch.bfloat16, torch.float16)
}
WIDENED = {
    f"a matrix of {k} columns, {dtype}": (widened, k, dtype)
    for k in (K, 14336)
    for dtype in (torch.bfloat16, torch.float16)
}
CASES = SCALED | FUSED | GROUPED | VECTOR | ARRANGED | WIDENED


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton.quantized import (
        choices,
        exchange,
        fragment_gemm,
        fragment_vector,
        fused_vector,
        hopper,
        matrices,
    )
    from pagewire.worker.ops.triton.quantized import vector as vectors
    from support.kernels.cross_compile import Launch, counts_of_cases

    for module in (fragment_gemm, fragment_vector, fused_vector, hopper, matrices, vectors):
        module.dependent_launch = lambda device: True
    for module in (exchange, fragment_gemm, fused_vector, hopper):
        module.multiprocessors = lambda device: 132
    assert len(fragment_gemm.SHAPES) == 15
    assert len(choices.SHAPES) == 6
    shapes = fragment_gemm.SHAPES

    def count(launch: Launch) -> dict[str, int]:
        return {
            "threads": launch.threads,
            "resident": launch.resident,
            "serialized": launch.serialized,
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "arrivals": launch.arrivals,
            "tensor copies": launch.count("cp.async.bulk.tensor"),
            "waits": launch.count("griddepcontrol.wait"),
            "rounded values": launch.count("cvt.rn.bf16.f32"),
            "scaling divisions": launch.count("div.full.f32"),
            "wide loads": sum(
                "ld.global" in line and ".v4" in line for line in launch.ptx.splitlines()
            ),
            "stores": launch.count("st.global"),
            "wide stores": launch.count("st.global.v4"),
        }

    found = counts_of_cases(CASES, count)
    for name, (_, shape, *_) in GROUPED.items():
        found[name][0]["wanted"] = shapes[shape].programs
        found[name][0]["pieces"] = shapes[shape].tokens.bit_count()
    for name, (_, shape, *_) in SCALED.items():
        found[name][0]["consumers"] = choices.SHAPES[shape].consumers
        found[name][0]["halves"] = choices.SHAPES[shape].halves
    return found


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor_and_waits(case, launches):
    [launch] = launches[case]
    assert launch["shared"] <= SHARED_LIMIT
    limit = SPILLED_LIMIT if "add True" in case or case in ARRANGED else 0
    assert launch["spilled"] <= (PARTS_SPILLED_LIMIT if "2 parts" in case else limit)
    assert not launch["serialized"]
    # The loader and the consumers. The compiler may put the loader's wait into two branches.
    waits = 2 if case in GROUPED else launch["consumers"] + 1 if case in SCALED else 1
    assert waits <= launch["waits"] <= waits + (case in SCALED)


@pytest.mark.parametrize("case", WIDENED)
def test_a_matrix_is_written_as_fast_as_memory_takes_it(case, launches):
    [launch] = launches[case]
    assert launch["resident"] >= 8
    assert launch["wide loads"] == 2  # a thread has 64 weights
    assert launch["stores"] == launch["wide stores"] == 8


@pytest.mark.parametrize("case", SCALED)
def test_consumers_add_sums_of_128_products(case, launches):
    [launch] = launches[case]
    consumers, halves = launch["consumers"], launch["halves"]
    assert launch["threads"] == (consumers + 1) * 128
    # Four instructions of 32 products. A loop for 128 tokens, and one for the last 64.
    assert launch["wgmma"] == consumers * 4 * (3 if halves == 2 else 1)


@pytest.mark.parametrize("case", SCALED)
def test_results_are_rounded_in_pairs_and_activations_do_not_scale(case, launches):
    """Otherwise, gated tiles end with twice as many slow instructions."""
    [launch] = launches[case]
    assert launch["rounded values"] == launch["scaling divisions"] == 0


@pytest.mark.parametrize("case", GROUPED)
def test_programs_of_a_shape_run_at_once(case, launches):
    [launch] = launches[case]
    assert launch["resident"] >= launch["wanted"]
    assert launch["wgmma"] == 8 * launch["pieces"]  # of 16 columns each
    assert launch["mma"] == 0


@pytest.mark.parametrize("case", GROUPED)
def test_consumers_free_the_previous_stage_of_each_run(case, launches):
    """The stage is computed in the loop: if it is the first one in each run, the loader waits
    forever, which the interpreter would not show."""
    [launch] = launches[case]
    [stage] = launch["arrivals"]
    assert stage not in ("", "%stage")
    assert not stage.startswith("%c")


@pytest.mark.parametrize("case", ARRANGED)
def test_tensor_cores_multiply_one_token(case, launches):
    """16 products for a run of columns: eight of weights, and eight that sum the inputs."""
    [launch] = launches[case]
    runs = int(case.split(", ")[2].split()[0]) // 128
    warps = launch["threads"] // 32
    assert launch["mma"] == 16 * runs // warps
    assert launch["wide loads"] >= 2 * runs // warps
    assert launch["resident"] * warps >= 16


@pytest.mark.parametrize("case", VECTOR)
def test_weights_of_one_token_are_read_16_bytes_at_a_time(case, launches):
    [launch] = launches[case]
    assert launch["wide loads"] > 0
    assert launch["wgmma"] == 0


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
