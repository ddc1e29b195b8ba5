"""Attention from an FP8 cache has the same bits with any batch, chunks and shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernels.attention.test_attention import make_cache
from kernels.invariant.test_attention_bits import CASES, HEADS, TOLERANCE, int32, shared_rows
from pagewire.worker.ops.reference import attention as reference
from pagewire.worker.ops.triton.invariant import ops
from pagewire.worker.ops.triton.invariant.prefill import SegmentPrefillConfig
from pagewire.worker.ops.triton.invariant.segments import SEGMENT, TILE
from support.kernels.any_threads import any_threads
from support.kernels.comparison import CUDA, DTYPES, assert_near, poisoned_outputs
from support.kernels.fp8_cache import quantized_pair


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with nullcontext() if CUDA else any_threads():
        yield


def decode(q: Tensor, given: tuple, where: tuple, rows: list[int], **options) -> Tensor:
    """Attend from some rows of `q`; `where`: block tables, slots and lengths of all rows."""
    k, v, scales = given
    tables, slots, lengths = where
    at = torch.tensor(rows, device=q.device)
    with poisoned_outputs():
        return ops.decode_attention(
            q[at], k, v, tables, slots[at], lengths[at], 0.3, scales=scales, **options
        )


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_a_prompt_decodes_to_the_same_bits_in_chunks_of_any_size(heads, dtype, device):
    length = SEGMENT + TILE + 9
    cache = make_cache([length], heads[1], heads[2], torch.float32, device)
    k, v, scales = quantized_pair(cache.k, cache.v)
    q = torch.randn(length, heads[0], heads[2], device=device).to(dtype)

    def prefill(chunk: int, config: SegmentPrefillConfig | None = None) -> Tensor:
        pieces = []
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            with poisoned_outputs():
                piece = ops.prefill_attention(
                    q[begin:end], k, v, cache.tables, cache.slots, int32([0, end - begin], device),
                    int32([end], device), 0.3, end - begin, scales=scales, config=config,
                )  # fmt: skip
            pieces.append(piece)
        return torch.cat(pieces)

    whole = prefill(length)
    clean = quantized_pair(cache.clean_k, cache.clean_v)
    expected = reference.prefill_attention(
        q.float(), *clean[:2], cache.tables, cache.slots, int32([0, length], device),
        cache.lengths, 0.3, length, scales=clean[2],
    )  # fmt: skip
    assert_near(whole, expected.to(dtype), TOLERANCE[dtype])
    assert torch.equal(prefill(50), whole)
    assert torch.equal(prefill(length, SegmentPrefillConfig(rows=64, warps=4, stages=1)), whole)
    for position in (0, TILE - 1, TILE, SEGMENT - 1, SEGMENT, length - 1):
        where = (cache.tables, cache.slots, int32([position + 1], device))
        decoded = decode(q[position : position + 1], (k, v, scales), where, [0])
        assert torch.equal(decoded[0], whole[position]), position


def test_rows_and_shared_prefixes_change_no_bits(device):
    heads, dtype = HEADS[0], DTYPES[0]
    groups = [([0, 1, 2, 3], 19), ([1, 2], 40)]
    lengths = [310, 700, 645, 600, 90]
    cache, shared = shared_rows(groups, lengths, heads, torch.float32, device)
    assert shared.lengths.tolist() == [SEGMENT, 2 * SEGMENT, 2 * SEGMENT, SEGMENT, 0]
    given, where = quantized_pair(cache.k, cache.v), (cache.tables, cache.slots, cache.lengths)
    q = torch.randn(len(lengths), heads[0], heads[2], device=device).to(dtype)
    rows = list(range(len(lengths)))
    alone = torch.stack([decode(q, given, where, [row])[0] for row in rows])
    assert torch.equal(decode(q, given, where, rows), alone)
    assert torch.equal(decode(q, given, where, rows, shared=shared), alone)
