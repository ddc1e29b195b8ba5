"""The kernels with one order of addition compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
INT = torch.int32


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
    from pagewire.worker.ops.triton.invariant import ops

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    of_rows = (meta(rows, dtype=INT), meta(rows, dtype=INT))
    shared = None
    if rows > 1:
        items = (meta(1, dtype=INT), meta(8, 6, dtype=INT), meta(32 * rows, dtype=INT))
        shared = SharedPrefixItems(*items, *of_rows)
    ops.decode_attention(q, cache, cache, tables, *of_rows, 0.1, shared=shared)


def prefill(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.invariant import ops

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(tokens, query_heads, head_dim), meta(9, 512, dtype=INT)
    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    ops.prefill_attention(q, cache, cache, tables, *of_chunks, 0.1, tokens // 8)


def linear(tokens: int, features: int, k: int, item_size: int) -> None:
    from pagewire.worker.ops.triton.invariant import ops

    dtype = torch.bfloat16 if item_size == 2 else torch.float32
    x, weight = meta(tokens, k, dtype=dtype), meta(2 * features, k, dtype=dtype)
    ops.norm_gate_up_silu_mul(x, None, 1e-6, weight)
    ops.linear_add(x, weight, meta(tokens, 2 * features, dtype=dtype))
    ops.norm_linear(x, meta(k, dtype=dtype), 1e-6, weight, meta(2 * features, dtype=dtype))


def stream(tokens: int, features: int, k: int, item_size: int) -> None:
    """The GEMMs of few tokens on Hopper."""
    from pagewire.worker.ops.triton.invariant import linear
    from pagewire.worker.ops.triton.streamed.config import stream_config

    x, weight = meta(tokens, k), meta(2 * features, k)
    config = stream_config(tokens, 2 * features, k)
    linear.norm_gate_up_silu_mul(x, None, 1e-6, weight, config=config)
    linear.linear_add(x, weight, meta(tokens, 2 * features), config=config)
    linear.linear(x, weight, meta(2 * features), config=config)


def pointwise(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    """The other kernels of a layer; some variants differ from those of other workers."""
    from pagewire.worker.ops.triton.invariant import ops

    cache = meta(1000, kv_heads, 16, head_dim)
    norm, cos_sin = meta(head_dim), meta(4096, head_dim, dtype=torch.float32)
    places = (meta(tokens, dtype=INT), meta(tokens, dtype=INT), meta(9, 512, dtype=INT))
    qkv = meta(tokens, (query_heads + 2 * kv_heads) * head_dim)
    ops.qk_norm_rope_kv_write(qkv, norm, norm, 1e-6, cos_sin, *places, cache, cache)
    ops.silu_mul(meta(tokens, 6144))


def sample(rows: int, vocabulary: int, k: int, _: int) -> None:
    from kernels.compile.test_pointwise import meta_masks, meta_state
    from pagewire.worker.ops.triton.invariant import ops

    logits, state = meta(rows, vocabulary), meta_state(rows)
    for given in (state, replace(state, masks=meta_masks(rows, vocabulary))):
        for filtered in (True, False):
            ops.sample(logits, given, filtered)
    ops.logprobs(logits, meta(rows, dtype=INT), k)


Case = tuple[Callable[[int, int, int, int], None], int, int, int, int]
CASES: dict[str, Case] = {
    "decode one row": (decode, 1, 16, 8, 128),
    "decode": (decode, 64, 32, 8, 128),
    "decode of small heads": (decode, 64, 14, 2, 64),
    "decode of large heads": (decode, 64, 8, 4, 256),
    "prefill": (prefill, 8192, 32, 8, 128),
    "prefill of small heads": (prefill, 8192, 14, 2, 64),
    "prefill of large heads": (prefill, 8192, 8, 4, 256),
    "linear, one token of 0.6B": (linear, 1, 3072, 1024, 2),
    "linear, four tokens of 8B": (linear, 4, 14336, 4096, 2),
    "linear, sixteen tokens of 8B": (linear, 16, 14336, 4096, 2),
    "linear, tokens without a cuBLAS algorithm": (linear, 200, 1000, 528, 2),
    "linear in float32": (linear, 20, 512, 256, 4),
    "stream, one token of 0.6B": (stream, 1, 3072, 1024, 2),
    "stream, one token of 8B, few rows": (stream, 1, 2048, 14336, 2),
    "stream, sixteen tokens of 8B": (stream, 16, 14336, 4096, 2),
    "stream, thirty tokens of 8B": (stream, 30, 14336, 4096, 2),
    "pointwise": (pointwise, 100, 16, 8, 128),
    "sampling": (sample, 8, 151936, 5, 0),
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton import adjustments, logprobs, rope, sampling
    from pagewire.worker.ops.triton import sampling_filters as filters
    from pagewire.worker.ops.triton.invariant import (
        decode,
        linear,
        norm,
        prefill,
        shared_prefix,
    )
    from pagewire.worker.ops.triton.rowwise import activation
    from pagewire.worker.ops.triton.streamed import gemm as streamed
    from support.kernels.cross_compile import Launch, counts_of_cases

    for module in (decode, shared_prefix, sampling):
        module.multiprocessors = lambda device: 132
    for module in (
        *(decode, linear, norm, prefill, shared_prefix, streamed),
        *(activation, adjustments, logprobs, rope, sampling, filters),
    ):
        module.dependent_launch = lambda device: True

    def count(launch: Launch) -> dict[str, int]:
        return {
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "tensor_copies": launch.count("cp.async.bulk.tensor"),
            "copies_early": launch.ptx.rpartition("griddepcontrol.wait")[0].count("bulk.tensor"),
            "resident": launch.resident,
            "fused": launch.count("fma.rn.f32"),
            "waits": launch.count("griddepcontrol.wait"),
            "loads_early": launch.ptx.split("griddepcontrol.wait")[0].count("ld.global"),
        }

    return counts_of_cases(CASES, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT, launch
        assert launch["spilled"] == 0, launch


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_of_the_chain_waits(case, launches):
    for launch in launches[case]:
        assert launch["waits"] >= (launch["kernel"] != "_plan_kernel"), launch


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("prefill")])
def test_prefill_runs_on_warpgroup_instructions(case, launches):
    (launch,) = launches[case]
    large = CASES[case][-1] > 128  # too few rows for warpgroup instructions
    assert (launch["wgmma"] == 0) == large
    assert (launch["mma"] > 0) == large


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("decode", "prefill"))])
def test_keys_and_values_are_copied_asynchronously(case, launches):
    assert max(launch["async_copies"] for launch in launches[case]) >= 8


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("linear, ")])
def test_products_run_on_tensor_cores(case, launches):
    gemms = [launch for launch in launches[case] if launch["kernel"] == "_ordered_kernel"]
    assert len(gemms) == 3
    assert all(launch["wgmma"] + launch["mma"] > 0 for launch in gemms)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("stream, ")])
def test_the_copy_engine_fills_tiles_before_the_wait(case, launches):
    gemms = [launch for launch in launches[case] if launch["kernel"] == "stream_kernel"]
    assert len(gemms) == 3
    for launch in gemms:
        assert launch["wgmma"] > 0
        assert launch["tensor_copies"] > launch["copies_early"] > 0


def test_weights_are_loaded_before_the_wait(launches):
    for case in ("linear, one token of 0.6B", "linear, four tokens of 8B"):
        for launch in launches[case]:
            assert launch["loads_early"] > 0 or launch["kernel"] == "_rms_norm_kernel"


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("sampling")])
def test_no_multiplication_is_fused_with_an_addition(case, launches):
    """Products in float32 are, as there is no tensor core for them."""
    for launch in launches[case]:
        assert launch["fused"] == 0 or case == "linear in float32", launch


def test_all_variants_of_a_draw_fuse_nothing(launches):
    draws = [launch for launch in launches["sampling"] if launch["kernel"] == "_draw_kernel"]
    assert [launch["fused"] for launch in draws] == [0, 0, 0, 0]


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
