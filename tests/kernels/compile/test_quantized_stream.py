"""The kernel that streams FP8 weights for few tokens compiles for Hopper as intended, on any
machine. Run as a script, this file prints the launches as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.triton.streamed import scaled_choice
from pagewire.worker.ops.triton.streamed.scaled_config import (
    ScaledStream,
    filled,
    scaled_stream,
    shared_bytes,
)
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
FP8 = torch.float8_e4m3fn
# Rows and columns: matrices of Llama-3.1-8B and Qwen3-30B-A3B.
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 2048), (2048, 4096)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def stream(rows: int, k: int, tokens: int, config: ScaledStream, kind: str) -> None:
    from pagewire.worker.ops.triton.streamed import scaled

    scales, given = (meta(n, 1, dtype=torch.float32) for n in (rows, tokens))
    weight = ScaledWeight(meta(rows, k, dtype=FP8), scales, (1, k), None)
    out = meta(tokens, rows // 2 if kind == "gated" else rows)
    bias = meta(rows) if kind == "bias" else None
    how = {"add": kind == "add", "gated": kind == "gated"}
    if config.own:
        norm = {"norm": True, "norm_weight": meta(k), "eps": 1e-5}
        scaled.multiply_token(meta(1, k), weight, out, bias, config=config, **norm, **how)
        return
    x = QuantizedInput(meta(tokens, k, dtype=FP8), given, torch.bfloat16)
    scaled.multiply(x, weight, out, bias, config=config, **how)


def configs() -> list[tuple[int, int, int, ScaledStream]]:
    """Every measured choice, and choices by the rule, for tokens of all widths."""
    found = [
        (rows, k, tokens, scaled_stream(tokens, rows, k))
        for rows, k in SHAPES
        for tokens in (1, 16, 32, 64)
    ]
    found += [(6144, 4096, 1, filled(rows, 1, 4096, own=True)) for rows in (16, 48, 64)]
    found.append((4096, 14336, 1, filled(32, 1, 14336, own=True)))
    found += [
        (6144, 4096, tokens, filled(64, tokens, 4096, tiles))
        for tokens in (16, 32, 64)
        for tiles in (2, 4)
    ]
    found += [
        (rows, k, tokens, config)
        for rows, k in scaled_choice.MEASURED
        for tokens in (1, 8, 16, 32, 64)
        if (config := scaled_choice.choose(tokens, rows, k, 132)) is not None
    ]
    return found


def kinds(config: ScaledStream) -> list[str]:
    return ["bias", "add"] + (["gated"] if config.rows % 16 == 0 else [])


STREAMED = {
    f"{(rows, k)}, {tokens} tokens, {config}, {kind}": (stream, rows, k, tokens, config, kind)
    for rows, k, tokens, config in configs()
    for kind in kinds(config)
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton.streamed import scaled
    from support.kernels.cross_compile import Launch, counts_of_cases

    scaled.dependent_launch = lambda device: True
    scaled.multiprocessors = lambda device: 132

    def count(launch: Launch) -> dict[str, int]:
        return {
            "threads": launch.threads,
            "resident": launch.resident,
            "serialized": launch.serialized,
            "wgmma": launch.count("wgmma.mma_async"),
            "waits": launch.count("griddepcontrol.wait"),
        }

    return counts_of_cases(STREAMED, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", STREAMED)
def test_fits_the_multiprocessor_without_spills(case, launches):
    [launch] = launches[case]
    assert launch["spilled"] == 0
    assert launch["shared"] <= SHARED_LIMIT
    assert not launch["serialized"]


@pytest.mark.parametrize("case", STREAMED)
def test_streamed_programs_run_at_once_and_wait(case, launches):
    [launch] = launches[case]
    _, _, k, _, config, _ = STREAMED[case]
    assert launch["threads"] == 256
    assert launch["shared"] <= shared_bytes(config, k)
    assert launch["resident"] >= 1
    assert launch["wgmma"] == 4 * config.tiles  # of 32 columns each
    # The consumers, and the loader after the first weights. The compiler may copy the latter.
    assert (launch["waits"] == 1) if config.own else (launch["waits"] >= 2)


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
