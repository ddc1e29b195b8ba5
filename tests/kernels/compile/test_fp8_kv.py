"""The kernels of an FP8 KV cache compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
# Bytes of a few values that kernels of small heads read again; decode attention spills none.
SPILLED_LIMIT = 40
INT = torch.int32


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache_of(kv_heads: int, head_dim: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The keys or values of 1,000 blocks, and the option with the scales of both."""
    from pagewire.worker.ops.contract.blocks import KVScales

    scales = meta(1000, kv_heads, 16, dtype=torch.float32)
    cache = meta(1000, kv_heads, 16, head_dim, dtype=torch.float8_e4m3fn)
    return cache, {"scales": KVScales(scales, scales)}


def decode(
    rows: int, query_heads: int, kv_heads: int, head_dim: int, name: str = "triton", **options: Any
) -> None:
    from pagewire.worker.ops import load_ops
    from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems

    ops = load_ops(name)
    cache, scales = cache_of(kv_heads, head_dim)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    of_rows = (meta(rows, dtype=INT), meta(rows, dtype=INT))
    shared = None
    if rows > 1 and not options:
        items = (meta(1, dtype=INT), meta(8, 6, dtype=INT), meta(32 * rows, dtype=INT))
        shared = SharedPrefixItems(*items, *of_rows)
    options = {"shared": shared} | scales | options
    ops.decode_attention(q, cache, cache, tables, *of_rows, 0.1, **options)


def decode_long(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    """Both loops in one kernel."""
    from pagewire.worker.ops.triton.attention.decode import LongShares, decode_config

    config = decode_config(torch.bfloat16, head_dim, query_heads // kv_heads, rows, fp8=True)
    for tile, stages in ((32, 3), (64, 2)):
        long = LongShares(tile, stages, share=512)
        decode(
            rows, query_heads, kv_heads, head_dim, shared=None, config=replace(config, long=long)
        )


def decode_with_options(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    decode(rows, query_heads, kv_heads, head_dim, window=4096, soft_cap=50.0)


def decode_invariant(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    decode(rows, query_heads, kv_heads, head_dim, "invariant")


def prefill(
    tokens: int, query_heads: int, kv_heads: int, head_dim: int, name: str = "triton", **options
) -> None:
    from pagewire.worker.ops import load_ops

    cache, scales = cache_of(kv_heads, head_dim)
    q, tables = meta(tokens, query_heads, head_dim), meta(9, 512, dtype=INT)
    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    load_ops(name).prefill_attention(
        q, cache, cache, tables, *of_chunks, 0.1, tokens // 8, **scales, **options
    )


def prefill_with_options(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    prefill(tokens, query_heads, kv_heads, head_dim, window=4096, soft_cap=50.0)


def prefill_invariant(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    prefill(tokens, query_heads, kv_heads, head_dim, "invariant")


def rope(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.rope import qk_norm_rope_kv_write

    cache, scales = cache_of(kv_heads, head_dim)
    qkv = meta(tokens, (query_heads + 2 * kv_heads) * head_dim)
    norm, cos_sin = meta(head_dim), meta(4096, head_dim, dtype=torch.float32)
    places = (meta(tokens, dtype=INT), meta(tokens, dtype=INT), meta(9, 512, dtype=INT))
    qk_norm_rope_kv_write(qkv, norm, norm, 1e-6, cos_sin, *places, cache, cache, **scales)


Case = tuple[Callable[[int, int, int, int], None], int, int, int, int]
CASES: dict[str, Case] = {
    "decode one row": (decode, 1, 16, 8, 128),
    "decode": (decode, 64, 32, 8, 128),
    "decode of many rows": (decode, 400, 16, 8, 128),
    "decode of small heads": (decode, 64, 14, 2, 64),
    "decode of large heads": (decode, 64, 8, 4, 256),
    "decode of the smallest heads": (decode, 64, 20, 1, 16),
    "decode with a window and a soft cap": (decode_with_options, 64, 32, 8, 128),
    "decode in one order": (decode_invariant, 64, 32, 8, 128),
    "decode of small heads in one order": (decode_invariant, 64, 14, 2, 64),
    "decode of large heads in one order": (decode_invariant, 64, 8, 4, 256),
    "decode one row of long shares": (decode_long, 1, 32, 8, 128),
    "decode of long shares": (decode_long, 4, 32, 8, 128),
    "prefill": (prefill, 8192, 32, 8, 128),
    "prefill of short chunks": (prefill, 64, 16, 8, 128),
    "prefill of small heads": (prefill, 8192, 14, 2, 64),
    "prefill of large heads": (prefill, 8192, 8, 4, 256),
    "prefill with a window and a soft cap": (prefill_with_options, 8192, 32, 8, 128),
    "prefill of large heads with both": (prefill_with_options, 8192, 8, 4, 256),
    "prefill in one order": (prefill_invariant, 8192, 32, 8, 128),
    "prefill of small heads in one order": (prefill_invariant, 8192, 14, 2, 64),
    "prefill of large heads in one order": (prefill_invariant, 8192, 8, 4, 256),
    "rope": (rope, 4096, 32, 8, 128),
    "rope of few tokens": (rope, 1, 16, 8, 128),
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton import rope as rope_module
    from pagewire.worker.ops.triton.attention import decode as usual_decode
    from pagewire.worker.ops.triton.attention import prefill as usual_prefill
    from pagewire.worker.ops.triton.attention import shared_prefix as usual_shared
    from pagewire.worker.ops.triton.invariant import decode as ordered_decode
    from pagewire.worker.ops.triton.invariant import prefill as ordered_prefill
    from pagewire.worker.ops.triton.invariant import shared_prefix as ordered_shared
    from support.kernels.cross_compile import Launch, counts_of_cases

    for module in (usual_decode, usual_shared, ordered_decode, ordered_shared):
        module.multiprocessors = lambda device: 132
    for module in (
        *(usual_decode, usual_prefill, usual_shared, rope_module),
        *(ordered_decode, ordered_prefill, ordered_shared),
    ):
        module.dependent_launch = lambda device: True

    def count(launch: Launch) -> dict[str, int]:
        return {
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "async_copies": launch.count("cp.async"),
            "to_fp8": launch.count("cvt.rn.satfinite.e4m3x2.f32"),
            "from_fp8": launch.count("cvt.rn.f16x2.e4m3x2"),
            "singly": launch.count("cvt.rn.bf16.f16") + launch.count("cvt.bf16.f16"),
            "resident": launch.resident,
            "neighbours": launch.neighbours,
        }

    return counts_of_cases(CASES, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT, launch
        # The merge and the plan read no cache; their own tests check them.
        if launch["kernel"] not in ("_merge_kernel", "_plan_kernel"):
            limit = 0 if launch["kernel"] == "decode_kernel" else SPILLED_LIMIT
            assert launch["spilled"] <= limit, launch


@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_converted_in_registers(case, launches):
    """Attention loads FP8 and widens it; RoPE rounds to FP8 before its stores."""
    for launch in launches[case]:
        if launch["kernel"] in ("_merge_kernel", "_plan_kernel"):
            continue
        stores = case.startswith("rope")
        assert (launch["to_fp8"] > 0) == stores, launch
        assert (launch["from_fp8"] > 0) == (not stores), launch
        # Shared segments of heads of 256 have one stage: two would spill registers.
        one_stage = launch["kernel"] == "_shared_segment_kernel" and "large heads" in case
        assert stores or one_stage or launch["async_copies"] >= 8, launch


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("rope")])
def test_no_number_is_converted_by_itself(case, launches):
    """From float16 to bfloat16 Hopper converts one number at a time, slowly."""
    for launch in launches[case]:
        assert launch["singly"] == 0, launch


@pytest.mark.parametrize("case", [case for case in CASES if "order" in case])
def test_both_kinds_of_matrix_instructions_add_the_same_columns(case, launches):
    """With four adjacent columns, mma.sync uses other columns at a time than wgmma."""
    for launch in launches[case]:
        assert set(launch["neighbours"]) <= {2}, launch


@pytest.mark.parametrize("case", [case for case in CASES if "order" not in case])
def test_matrix_instructions_are_those_of_plain_caches(case, launches):
    for launch in launches[case]:
        if launch["kernel"] in ("_prefill_kernel", "_shared_prefix_kernel"):
            assert launch["wgmma"] > 0 == launch["mma"], launch
        if launch["kernel"] == "decode_kernel":
            assert launch["mma"] > 0 == launch["wgmma"], launch


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("decode") and "order" not in c])
def test_all_programs_of_decode_run_at_once(case, launches):
    from pagewire.worker.ops.triton.attention.decode import decode_config

    _, rows, query_heads, kv_heads, head_dim = CASES[case]
    config = decode_config(torch.bfloat16, head_dim, query_heads // kv_heads, rows)
    of_loops = [one for one in launches[case] if one["kernel"] == "decode_kernel"]
    assert of_loops
    for launch in of_loops:
        assert launch["resident"] >= config.programs


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
