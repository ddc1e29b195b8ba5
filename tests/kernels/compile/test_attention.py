"""The attention and RoPE kernels compile for Hopper as intended, on any machine.

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

from pagewire.worker.ops.triton.attention import decode as attention_decode
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
INT = torch.int32


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import decode_attention

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    decode_attention(q, cache, cache, tables, meta(rows, dtype=INT), meta(rows, dtype=INT), 0.1)


def decode_long(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    """Both loops in one kernel."""
    from pagewire.worker.ops.triton.attention import decode_attention

    config = attention_decode.decode_config(torch.bfloat16, head_dim, query_heads // kv_heads, rows)
    config = replace(config, long=attention_decode.LongShares(tile=16, stages=4, share=512))
    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    where = (tables, meta(rows, dtype=INT), meta(rows, dtype=INT))
    decode_attention(q, cache, cache, *where, 0.1, config=config)


def prefill(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import prefill_attention

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(tokens, query_heads, head_dim), meta(9, 512, dtype=INT)
    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    prefill_attention(q, cache, cache, tables, *of_chunks, 0.1, tokens // 8)


def decode_with_options(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import decode_attention

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    where = (tables, meta(rows, dtype=INT), meta(rows, dtype=INT))
    decode_attention(q, cache, cache, *where, 0.1, window=4096, soft_cap=50.0)


def decode_with_sinks(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import decode_attention

    cache, sinks = meta(1000, kv_heads, 16, head_dim), meta(query_heads)
    q, tables = meta(rows, query_heads, head_dim), meta(rows + 1, 512, dtype=INT)
    where = (tables, meta(rows, dtype=INT), meta(rows, dtype=INT))
    decode_attention(q, cache, cache, *where, 0.1, sinks=sinks, window=128)


def prefill_with_options(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import prefill_attention

    cache = meta(1000, kv_heads, 16, head_dim)
    q, tables = meta(tokens, query_heads, head_dim), meta(9, 512, dtype=INT)
    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    options = {"window": 4096, "soft_cap": 50.0}
    prefill_attention(q, cache, cache, tables, *of_chunks, 0.1, tokens // 8, **options)


def prefill_with_sinks(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.attention import prefill_attention

    cache, sinks = meta(1000, kv_heads, 16, head_dim), meta(query_heads)
    q, tables = meta(tokens, query_heads, head_dim), meta(9, 512, dtype=INT)
    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    options = {"sinks": sinks, "window": 128}
    prefill_attention(q, cache, cache, tables, *of_chunks, 0.1, tokens // 8, **options)


def rope(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> None:
    from pagewire.worker.ops.triton.rope import qk_norm_rope_kv_write

    cache = meta(1000, kv_heads, 16, head_dim)
    qkv = meta(tokens, (query_heads + 2 * kv_heads) * head_dim)
    norm, cos_sin = meta(head_dim), meta(4096, head_dim, dtype=torch.float32)
    places = (meta(tokens, dtype=INT), meta(tokens, dtype=INT), meta(9, 512, dtype=INT))
    for waited_for in (False, True):
        qk_norm_rope_kv_write(
            qkv,
            norm,
            norm,
            1e-6,
            cos_sin,
            *places,
            cache,
            cache,
            unscaled=meta(tokens, 4096),
            waited_for=waited_for,
        )


Case = tuple[Callable[[int, int, int, int], None], int, int, int, int]
CASES: dict[str, Case] = {
    "decode one row": (decode, 1, 16, 8, 128),
    "decode": (decode, 64, 32, 8, 128),
    "decode of many rows": (decode, 400, 16, 8, 128),
    "decode of small heads": (decode, 64, 14, 2, 64),
    "decode of large heads": (decode, 64, 8, 4, 256),
    "decode one row of long shares": (decode_long, 1, 32, 8, 128),
    "decode of long shares": (decode_long, 4, 32, 8, 128),
    "prefill": (prefill, 8192, 32, 8, 128),
    "prefill of short chunks": (prefill, 64, 16, 8, 128),
    "prefill of small heads": (prefill, 8192, 14, 2, 64),
    "prefill of large heads": (prefill, 8192, 8, 4, 256),
    "decode with a window and a soft cap": (decode_with_options, 64, 32, 8, 128),
    "decode of large heads with both": (decode_with_options, 64, 8, 4, 256),
    "prefill with a window and a soft cap": (prefill_with_options, 8192, 32, 8, 128),
    "prefill of large heads with both": (prefill_with_options, 8192, 8, 4, 256),
    "decode with sinks": (decode_with_sinks, 64, 64, 8, 64),
    "prefill with sinks": (prefill_with_sinks, 8192, 64, 8, 64),
    "rope": (rope, 4096, 32, 8, 128),
    "rope of few tokens": (rope, 1, 16, 8, 128),
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton import rope as rope_module
    from pagewire.worker.ops.triton.attention import prefill as attention_prefill
    from support.kernels.cross_compile import Launch, counts_of_cases

    attention_decode.multiprocessors = lambda device: 132
    for module in (attention_decode, attention_prefill, rope_module):
        module.dependent_launch = lambda device: True

    def count(launch: Launch) -> dict[str, int]:
        return {
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "resident": launch.resident,
            "waits": launch.count("griddepcontrol.wait"),
            "starts_early": launch.ptx.split("griddepcontrol.wait")[0].count(
                "griddepcontrol.launch_dependents"
            ),
            "loads_early": launch.ptx.split("griddepcontrol.wait")[0].count("ld.global"),
        }

    return counts_of_cases(CASES, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT
        assert launch["spilled"] == 0


@pytest.mark.parametrize("case", CASES)
def test_waits_for_its_predecessor(case, launches):
    waits = [launch["waits"] for launch in launches[case]]
    # Decode attention waits at its beginning, or at its end if another kernel runs beside it. Its
    # merge waits with and without pieces to merge. Their plan is first, and does not let the next
    # kernel start early. RoPE is launched twice.
    expected = {"decode": [0, 2, 2], "prefill": [1], "rope": [1, 1]}
    if case.endswith("long shares"):  # two loops, each with the early wait
        expected["decode"] = [0, 3, 2]
    assert waits == expected[case.split()[0]][case.startswith("decode one row") :]


@pytest.mark.parametrize("case", CASES)
def test_a_single_row_lets_the_next_kernels_start_before_it_waits(case, launches):
    early = [launch["starts_early"] for launch in launches[case]]
    if case.startswith(("decode one row", "rope")):  # RoPE: if the device finds one token
        assert early == [1, 1]
    else:
        assert not any(early)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("rope")])
def test_rope_reads_only_complete_input_before_its_wait(case, launches):
    late, early = launches[case]
    assert 0 < late["loads_early"] < early["loads_early"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("prefill")])
def test_prefill_runs_on_warpgroup_instructions(case, launches):
    (launch,) = launches[case]
    assert launch["wgmma"] > 0
    assert launch["mma"] == 0


@pytest.mark.parametrize("case", ["prefill", "prefill of short chunks", "prefill of small heads"])
def test_two_programs_of_prefill_share_a_multiprocessor(case, launches):
    """One computes a softmax while the other uses the tensor cores."""
    assert launches[case][0]["resident"] >= 2


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("decode")])
def test_decode_runs_on_warp_instructions(case, launches):
    *_, launch, merge = launches[case]
    assert launch["mma"] > 0
    assert launch["wgmma"] == merge["wgmma"] == 0


@pytest.mark.parametrize("case", ["decode", "decode of many rows"])
def test_a_group_of_query_heads_is_padded_to_eight(case, launches):
    _, rows, query_heads, kv_heads, head_dim = CASES[case]
    tile = attention_decode.decode_config(
        torch.bfloat16, head_dim, query_heads // kv_heads, rows
    ).tile
    # One warp; an instruction multiplies 16 x 16 of a matrix by 8 columns, the query heads.
    assert launches[case][-2]["mma"] == 2 * (tile // 16) * (head_dim // 16)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("decode")])
def test_all_programs_of_decode_run_at_once(case, launches):
    _, rows, query_heads, kv_heads, head_dim = CASES[case]
    group = query_heads // kv_heads
    config = attention_decode.decode_config(torch.bfloat16, head_dim, group, rows)
    assert launches[case][-2]["resident"] >= config.programs


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("rope")])
def test_keys_and_values_are_copied_asynchronously(case, launches):
    assert max(launch["async_copies"] for launch in launches[case]) >= 8


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
