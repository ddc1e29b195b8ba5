"""Counts of the tokens of sequences with penalties, at the end of steps with and without drafts."""

from __future__ import annotations

import triton
import triton.language as tl

from pagewire.worker.ops.contract import sampling as contract

_PENALIZED = tl.constexpr(contract.PENALIZED)
_MAX_COUNTED = tl.constexpr(contract.MAX_COUNTED)


@triton.jit
def count_token(token, slot, kinds_ptr, counts_ptr, counts_stride):
    """Compute `reference.sampling.count_tokens` for one row."""
    if (tl.load(kinds_ptr + slot) & _PENALIZED) != 0:
        at = counts_ptr + slot.to(tl.int64) * counts_stride + token
        seen = tl.load(at).to(tl.int32)
        more = (seen & _MAX_COUNTED) < _MAX_COUNTED
        tl.store(at, (seen + more.to(tl.int32)).to(tl.int16))
