"""The kernels of latent attention compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
INT, HALF, FLOAT = torch.int32, torch.bfloat16, torch.float32
RANK, ROTATED, PLAIN = 512, 64, 128  # of DeepSeek V2 and V3


def meta(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    queries = meta(tokens, heads, PLAIN + ROTATED, dtype=dtype)
    cache = meta(1000, 1, 16, RANK + ROTATED, dtype=dtype)
    absorbed = meta(tokens, heads, RANK, dtype=dtype)
    return absorbed, queries[..., PLAIN:], cache, meta(513, 512, dtype=INT)


def decode(rows: int, heads: int, dtype: torch.dtype) -> None:
    from pagewire.worker.ops.triton.latent import latent_decode_attention

    of_rows = (meta(rows, dtype=INT), meta(rows, dtype=INT))
    latent_decode_attention(*arguments(rows, heads, dtype), *of_rows, 0.1)


def prefill(tokens: int, heads: int, dtype: torch.dtype) -> None:
    from pagewire.worker.ops.triton.latent import latent_prefill_attention

    of_chunks = (meta(8, dtype=INT), meta(9, dtype=INT), meta(8, dtype=INT))
    latent_prefill_attention(*arguments(tokens, heads, dtype), *of_chunks, 0.1, tokens // 8)


def write(tokens: int, heads: int, dtype: torch.dtype) -> None:
    from pagewire.worker.ops.triton.latent import latent_rope_kv_write

    _, _, cache, tables = arguments(tokens, heads, dtype)
    projected = meta(tokens, heads * (PLAIN + ROTATED) + RANK + ROTATED, dtype=dtype)
    q = projected[:, : -RANK - ROTATED].unflatten(1, (heads, -1))
    latent = projected[:, -RANK - ROTATED :]
    where = (meta(4096, ROTATED, dtype=FLOAT), meta(tokens, dtype=INT), meta(tokens, dtype=INT))
    latent_rope_kv_write(q, latent, meta(RANK, dtype=dtype), 1e-6, *where, tables, cache)


CASES = {
    "decode one row": (decode, 1, 16, HALF),
    "decode 16 heads": (decode, 64, 16, HALF),
    "decode few rows": (decode, 2, 16, HALF),
    "decode 20 heads": (decode, 64, 20, HALF),
    "decode 128 heads": (decode, 64, 128, HALF),
    "decode many rows": (decode, 400, 128, HALF),
    "decode float32": (decode, 64, 16, FLOAT),
    "prefill 16 heads": (prefill, 8192, 16, HALF),
    "prefill 20 heads": (prefill, 8192, 20, HALF),
    "prefill 128 heads": (prefill, 2048, 128, HALF),
    "prefill float32": (prefill, 512, 16, FLOAT),
    "write one token": (write, 1, 16, HALF),
    "write many tokens": (write, 4096, 128, HALF),
}
KERNELS = {
    "decode": ["_plan_kernel", "_latent_decode_kernel", "_merge_kernel"],
    "prefill": ["_latent_prefill_kernel"],
    "write": ["_latent_write_kernel"],
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton.latent import decode as latent_decode
    from support.kernels.cross_compile import Launch, counts_of_cases

    latent_decode.multiprocessors = lambda device: 132

    def count(launch: Launch) -> dict[str, int]:
        return {
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "resident": launch.resident,
        }

    return counts_of_cases(CASES, count)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor(case, launches):
    names = KERNELS[case.split()[0]]
    expected = names[1:] if case == "decode one row" else names
    assert [launch["kernel"] for launch in launches[case]] == expected
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT
        assert launch["spilled"] == 0, launch["kernel"]


@pytest.mark.parametrize("case", ["decode 128 heads", "prefill 16 heads", "prefill 128 heads"])
def test_64_query_rows_run_on_warpgroup_instructions(case, launches):
    launch = max(launches[case], key=lambda launch: launch["wgmma"] + launch["mma"])
    assert launch["wgmma"] > 0
    assert launch["mma"] == 0


@pytest.mark.parametrize("case", ["decode one row", "decode 16 heads"])
def test_few_heads_run_on_warp_instructions_of_two_programs(case, launches):
    launch = next(one for one in launches[case] if one["kernel"] == "_latent_decode_kernel")
    assert launch["mma"] > 0
    assert launch["resident"] >= 2


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("write")])
def test_vectors_are_copied_asynchronously(case, launches):
    copies = max(launch["async_copies"] for launch in launches[case])
    assert copies > 0 or case.endswith("float32")  # one stage has no copies ahead


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
