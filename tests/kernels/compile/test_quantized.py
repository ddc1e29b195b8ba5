"""The kernels of quantized linear layers compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    InputFormat,
    QuantizedInput,
    ScaledWeight,
)
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
HIDDEN, FEATURES = 4096, 6144
FP8 = torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(tokens: int, dtype: torch.dtype, group: int | None) -> None:
    from pagewire.worker.ops.triton.rowwise import quantize

    given = InputFormat(dtype, group, None)
    quantize.quantize(meta(tokens, HIDDEN), given)
    quantize.norm_quantize(meta(tokens, HIDDEN), meta(HIDDEN), 1e-6, given)
    quantize.silu_mul_quantize(meta(tokens, 28672), given)


def scaled(tokens: int, dtype: torch.dtype, block: tuple[int, int]) -> None:
    from pagewire.worker.ops.triton.quantized.scaled import scaled_linear, scaled_linear_add

    def floats(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.float32)

    scales = floats(-(-FEATURES // block[0]), -(-HIDDEN // block[1]))
    weight = ScaledWeight(meta(FEATURES, HIDDEN, dtype=dtype), scales, block, None)
    groups = HIDDEN // block[1]
    x = QuantizedInput(meta(tokens, HIDDEN, dtype=dtype), floats(tokens, groups), torch.bfloat16)
    scaled_linear(x, weight, meta(FEATURES))
    scaled_linear_add(x, weight, meta(tokens, FEATURES))


def grouped(tokens: int, bits: int, group: int, zeros: bool) -> None:
    from pagewire.worker.ops.triton.quantized.grouped import grouped_linear, grouped_linear_add

    groups = HIDDEN // group
    weight = GroupedWeight(
        values=meta(FEATURES, HIDDEN * bits // 8, dtype=torch.uint8),
        scales=meta(FEATURES, groups),
        zeros=meta(FEATURES, groups, dtype=torch.uint8) if zeros else None,
        order=None,
        bits=bits,
        group=group,
        columns=HIDDEN,
    )
    x = meta(tokens, HIDDEN)
    grouped_linear(x, weight, meta(FEATURES))
    grouped_linear_add(x, weight, meta(tokens, FEATURES))


INPUTS = {
    "inputs in FP8": (inputs, 64, FP8, None),
    "inputs in groups": (inputs, 64, FP8, 128),
    "inputs in INT8": (inputs, 64, torch.int8, None),
}
SCALED = {
    f"{name}, {tokens} tokens": (scaled, tokens, dtype, block)
    for name, dtype, block in (
        ("FP8 channels", FP8, (1, HIDDEN)),
        ("FP8 blocks", FP8, (128, 128)),
        ("INT8 channels", torch.int8, (1, HIDDEN)),
    )
    for tokens in (1, 64, 4096)
}
GROUPED = {
    f"{bits} bits in groups of {group}, {tokens} tokens": (grouped, tokens, bits, group, zeros)
    for bits, group, zeros in ((4, 128, True), (4, 32, False), (8, 128, False))
    for tokens in (1, 64, 4096)
}
CASES = INPUTS | SCALED | GROUPED


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton.quantized import grouped, scaled
    from pagewire.worker.ops.triton.rowwise import quantize
    from support.kernels.cross_compile import Launch, counts_of_cases

    for module in (grouped, quantize, scaled):
        module.dependent_launch = lambda device: True

    def count(launch: Launch) -> dict[str, int]:
        lines = launch.ptx.splitlines()
        return {
            "wide_loads": sum("ld.global" in line and ".v4" in line for line in lines),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "wgmma": launch.count("wgmma.mma_async"),
            "fp8": launch.count("e4m3.e4m3"),
            "int8": launch.count("s32.s8.s8"),
            "mma": launch.count("mma.sync"),
            "sums": sum("add.f32" in line or "fma.rn.f32" in line for line in lines),
            "waits": launch.count("griddepcontrol.wait"),
            "rounded pairs": launch.count("cvt.rn.bf16x2.f32"),
            "rounded values": launch.count("cvt.rn.bf16.f32"),
            "threads": launch.threads,
        }

    return counts_of_cases(CASES, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor_and_waits(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT
        assert launch["spilled"] == 0, launch["kernel"]
        assert launch["waits"] == 1


@pytest.mark.parametrize("case", SCALED | GROUPED)
def test_every_number_of_tokens_runs_on_the_same_instructions(case, launches):
    """A token's sums then have the same order alone and among thousands."""
    for launch in launches[case]:
        assert launch["wgmma"] > 0
        assert launch["mma"] == 0


@pytest.mark.parametrize("case", SCALED)
def test_weights_are_multiplied_in_eight_bits_and_copied_in_the_background(case, launches):
    for launch in launches[case]:
        assert launch["int8" if "INT8" in case else "fp8"] > 0
        assert launch["async_copies"] > 0


@pytest.mark.parametrize("case", [case for case in SCALED if case.startswith("FP8")])
def test_sums_of_fp8_leave_the_tensor_cores(case, launches):
    """Each output of a thread is added in float32 once for each step of the loop."""
    tokens = {"1 tokens": 16, "64 tokens": 64}.get(case.split(", ")[1], 128)
    rows = 128 if tokens == 128 else 64
    for launch in launches[case]:
        assert launch["sums"] >= rows * tokens // launch["threads"]


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_are_read_16_bytes_at_a_time(case, launches):
    assert [launch["wide_loads"] > 0 for launch in launches[case]] == [True] * 3


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_are_rounded_in_pairs(case, launches):
    """Those after a norm or an activation; a single value takes a slow instruction."""
    assert [launch["rounded pairs"] > 0 for launch in launches[case]] == [False, True, True]
    assert [launch["rounded values"] for launch in launches[case]] == [0] * 3


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
