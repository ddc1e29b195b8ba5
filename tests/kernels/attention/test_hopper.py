"""Prefill attention for Hopper: it compiles on any machine, and is correct on a Hopper GPU.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.triton.attention import prefill_hopper as hopper
from pagewire.worker.ops.triton.attention.prefill_hopper_fp8 import LOADER_WARPS
from support.kernels.clean_process import report_of
from support.kernels.comparison import FULL_SIZE, TOLERANCE, assert_near
from support.kernels.fp8_cache import quantized_pair

SHARED_LIMIT = 227 * 1024
HEADS = [(32, 8), (16, 8), (8, 8), (16, 1)]
HALVES = [torch.bfloat16, torch.float16]
# Bytes. The assembler of Triton 3.6 spills two registers for some shapes, that of 3.7 none.
SPILLED_LIMIT = 8
SPILLED_LIMIT_FP8 = 40  # values that the loader keeps between items
# (queries, tokens cached)
CHUNKS: list[list[tuple[int, int]]] = [
    [(300, 300)],
    [(1, 1), (15, 15), (16, 33), (1, 100), (33, 40), (17, 17), (128, 128), (130, 257)],
    [(1 + i % 3, 1 + i % 3 + i * 13 % 200) for i in range(255)],
    [(100, 1000), (0, 0), (0, 0)],
]
if FULL_SIZE:
    CHUNKS += [[(2000, 2000)] * 4, [(100, 4095), (1025, 2050)], [(512, 30_000)]]

CACHES = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0: wgmma runs on no other, nor in the interpreter",
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(
    heads: tuple[int, int], dtype: torch.dtype, block_size: int = 16, fp8: bool = False
) -> None:
    query_heads, kv_heads = heads
    of_cache = (1000, kv_heads, block_size)
    q = meta(4096, query_heads, 128, dtype=dtype)
    cache = meta(*of_cache, 128, dtype=torch.float8_e4m3fn if fp8 else dtype)
    scales = KVScales(*(meta(*of_cache, dtype=torch.float32),) * 2) if fp8 else None
    tables, slots, starts = (meta(*n, dtype=torch.int32) for n in ((9, 512), (8,), (9,)))
    hopper.prefill(torch.empty_like(q), q, cache, cache, tables, slots, starts, slots, 0.1, scales)


def compile_cases() -> list[dict]:
    """Compile for all heads, both dtypes and two block sizes; return the tested counts."""
    from support.kernels.cross_compile import recorded_launches

    hopper.dependent_launch = lambda device: True
    with recorded_launches() as launches:
        for heads in HEADS:
            launch(heads, HALVES[0])
        launch(HEADS[0], HALVES[1])
        launch(HEADS[0], HALVES[0], block_size=64)
        for heads in HEADS:
            launch(heads, HALVES[0], fp8=True)
        launch(HEADS[0], HALVES[1], fp8=True)
        launch(HEADS[0], HALVES[0], block_size=64, fp8=True)
    return [
        {
            "fp8": launch.count("cvt.rn.f16x2.e4m3x2") > 0,
            "kernel": launch.kernel,
            "shared": launch.shared,
            "spilled": launch.spilled,
            "threads": launch.threads,
            "warpgroup instructions": launch.count("wgmma.mma_async"),
            "warp instructions": launch.count("mma.sync"),
            "tensor copies": launch.count("cp.async.bulk.tensor"),
            "copies": launch.count("cp.async.cg.shared.global"),
            "from fp8": launch.count("cvt.rn.f16x2.e4m3x2"),
            "singly": launch.count("cvt.rn.bf16.f16") + launch.count("cvt.bf16.f16"),
            "register moves": launch.count("setmaxnreg"),
            "waits": launch.count("griddepcontrol.wait"),
        }
        for launch in launches
    ]


@pytest.fixture(scope="module")
def launches() -> list[dict]:
    return report_of(Path(__file__))


def test_it_fits_the_multiprocessor(launches):
    assert [one["fp8"] for one in launches] == [False] * (len(HEADS) + 2) + [True] * (
        len(HEADS) + 2
    )
    for compiled in launches:
        assert compiled["kernel"] == "prefill_hopper_kernel"
        assert compiled["shared"] <= SHARED_LIMIT
        assert compiled["spilled"] <= (SPILLED_LIMIT_FP8 if compiled["fp8"] else SPILLED_LIMIT)


def test_a_loader_copies_and_two_consumers_multiply(launches):
    pages, halves = 128 // 16, 2  # a copy takes a page and half of a head's dimensions
    for compiled in launches:
        # Two consumers and the loader, which uses one warp of a group of four for a plain cache.
        loaders = LOADER_WARPS.value if compiled["fp8"] else 4
        assert compiled["threads"] == 2 * 128 + 32 * loaders
        assert compiled["register moves"] > 0
        # Keys, values, values of a partial tile, and the queries of both consumers. With FP8 there
        # are only queries, and one warp of the loader copies the first half, another the second.
        expected = 2 if compiled["fp8"] else 3 * pages * halves + 2 * halves
        assert compiled["tensor copies"] == expected
        # Two consumers; three times scores, three times values; eight instructions each.
        assert compiled["warpgroup instructions"] == 2 * (3 + 3) * 8
        assert compiled["warp instructions"] == 0


def test_the_loader_converts_fp8_in_pairs(launches):
    tile = 128 * 128 // (LOADER_WARPS.value * 32)  # numbers of a thread
    for compiled in launches:
        # Keys and values, of the first tile and of the following ones; 16 numbers a copy.
        assert compiled["copies"] == (4 * tile // 16 if compiled["fp8"] else 0)
        assert compiled["from fp8"] == (2 * tile // 2 if compiled["fp8"] else 0)
        assert compiled["singly"] == 0


def test_it_waits_for_its_predecessor(launches):
    assert {compiled["waits"] for compiled in launches} == {1}


@pytest.mark.parametrize(
    ("supported", "shape"),
    [
        (True, {}),
        (True, {"heads": (32, 8), "tokens": 257}),
        (True, {"dtype": torch.float16}),
        (False, {"heads": (32, 8), "tokens": 256}),  # short chunks run in the plain kernel
        (False, {"heads": (24, 8)}),  # a group of three
        (False, {"head_dim": 64}),
        (False, {"dtype": torch.float32}),
        (True, {"cache": torch.float8_e4m3fn}),
        (True, {"cache": torch.float8_e4m3fn, "heads": (32, 8), "tokens": 33}),
        (False, {"cache": torch.float8_e4m3fn, "heads": (32, 8), "tokens": 32}),
        (False, {"cache": torch.float16}),
        (False, {"chunks": 256}),
    ],
    ids=str,
)
def test_supported_shapes(supported, shape, monkeypatch):
    given = {"heads": (16, 8), "tokens": 4096, "head_dim": 128, "dtype": torch.bfloat16}
    given |= {"chunks": 255} | shape
    q = meta(given["tokens"], given["heads"][0], given["head_dim"], dtype=given["dtype"])
    cached = given.get("cache", given["dtype"])
    cache = meta(10, given["heads"][1], 16, given["head_dim"], dtype=cached)
    arguments = (q, cache, given["chunks"], given["tokens"])
    assert not hopper.is_supported(*arguments)  # no Hopper GPU
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert hopper.is_supported(*arguments) == supported


def random_call(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dtype: torch.dtype,
    before: int = 0,
    padding: int = 0,
    block_size: int = 16,
    fp8: bool = False,
) -> tuple:
    """Arguments of `prefill` after `out`; cached values that no sequence wrote are NaN."""
    from kernels.attention.test_attention import make_cache

    device = torch.device("cuda")
    counts = [count for count, _ in chunks]
    lengths = [length for _, length in chunks]
    cache = make_cache(lengths, heads[1], 128, dtype, device, block_size)
    starts = torch.tensor(list(accumulate(counts, initial=before)), dtype=torch.int32).to(device)
    q = torch.randn(before + sum(counts) + padding, heads[0], 128, device=device).to(dtype)
    k, v, scales = quantized_pair(cache.k, cache.v) if fp8 else (cache.k, cache.v, None)
    return q, k, v, cache.tables, cache.slots, starts, cache.lengths, 128**-0.5, scales


def computed(call: tuple, before: int = 0) -> torch.Tensor:
    out = torch.full_like(call[0], torch.nan)
    out[:before] = 7
    hopper.prefill(out, *call)
    return out


def compare(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dtype: torch.dtype,
    before: int = 7,
    padding: int = 40,
    block_size: int = 16,
    fp8: bool = False,
) -> None:
    """With an FP8 cache also compare with the bits from its values in `dtype`."""
    from pagewire.worker.ops.reference.attention import prefill_attention

    call = random_call(chunks, heads, dtype, before, padding, block_size, fp8)
    out = computed(call, before)
    q, k, v, *others, scales = call
    if scales is not None:
        k, v = (
            (kv.float() * of_kv[..., None]).to(dtype)
            for kv, of_kv in ((k, scales.keys), (v, scales.values))
        )
        assert torch.equal(out, computed((q, k, v, *others), before))
    clean = (torch.nan_to_num(cache).float() for cache in (k, v))
    expected = prefill_attention(q.float(), *clean, *others, max(n for n, _ in chunks))
    expected[:before] = 7
    assert_near(out, expected.to(dtype), TOLERANCE[dtype])


@on_hopper
@CACHES
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)}-{chunks[0]}")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_follows_the_reference(heads, chunks, fp8):
    compare(chunks, heads, torch.bfloat16, fp8=fp8)


@on_hopper
@CACHES
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_follows_the_reference_in_float16(heads, fp8):
    compare(CHUNKS[1], heads, torch.float16, fp8=fp8)


@on_hopper
@CACHES
@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_it_reads_larger_blocks(block_size, fp8):
    compare(CHUNKS[1], (32, 8), torch.bfloat16, block_size=block_size, fp8=fp8)


@on_hopper
@CACHES
@pytest.mark.parametrize("chunks", [[(128, 128)], [(1, 1)], [(0, 0)], [(4, 0)]], ids=str)
def test_it_needs_no_padding(chunks, fp8):
    compare(chunks, (32, 8), torch.bfloat16, before=0, padding=int(chunks[0][0] == 0), fp8=fp8)


@on_hopper
@CACHES
@pytest.mark.parametrize("heads", [(32, 8), (16, 8)], ids=str)
def test_bits_do_not_depend_on_the_chunk_nor_on_the_run(heads, fp8):
    queries, length = 1000, 3000
    q, k, v, tables, slots, _, _, scale, scales = random_call(
        [(queries, length)], heads, torch.bfloat16, fp8=fp8
    )
    results = []
    for cuts in ([0, 1000], [0, 1000], [0, 64, 1000], [0, 1, 17, 500, 777, 1000], [0, 333, 1000]):
        starts = torch.tensor(cuts, dtype=torch.int32, device=q.device)
        slot = slots.repeat(len(cuts) - 1)
        lengths = length - queries + starts[1:]
        results.append(computed((q, k, v, tables, slot, starts, lengths, scale, scales)))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@on_hopper
@CACHES
def test_it_runs_in_graphs_again_and_again(fp8):
    call = random_call([(700, 2000), (300, 300)], (32, 8), torch.bfloat16, fp8=fp8)
    expected, out = computed(call), torch.empty_like(call[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            hopper.prefill(out, *call)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
