"""Attention over the paged KV cache.

Cached values must be finite wherever a block table points, also past the end of a sequence: an
implementation may mask a score by adding minus infinity, which leaves NaN as it is. A cache that
is allocated as zeros and written by `qk_norm_rope_kv_write` is finite.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.shared_prefix import PrefixLimits, SharedPrefixItems


class AttentionOps(Protocol):
    """Attention of decode rows and of prefill chunks."""

    def shared_prefix_limits(self, dtype: torch.dtype, head_dim: int, group: int) -> PrefixLimits:
        """Return the limits of the items that `decode_attention` accepts as `shared`.

        Args:
            dtype: of queries, keys and values.
            head_dim: of one head.
            group: query heads for each KV head.
        """

    def plan_decode(
        self,
        lengths: Tensor,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        shared: SharedPrefixItems | None = None,
        window: int | None = None,
        fp8: bool = False,
    ) -> Any:
        """Return the `plan` of `decode_attention` for these lengths.

        Args:
            lengths: `[rows]` int32, as in `decode_attention`.
            query_heads, kv_heads, head_dim: of one layer.
            dtype: of queries, keys and values.
            shared, window: as in `decode_attention`.
            fp8: whether the cache has scales.

        Returns:
            A value private to the implementation, valid until `lengths` or `shared` change, or None
            if the implementation needs no plan.
        """

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        *,
        scales: KVScales | None = None,
        shared: SharedPrefixItems | None = None,
        plan: Any = None,
        beside_prefill: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend from one new token of each sequence to its cached tokens.

        Args:
            q: `[rows, query_heads, head_dim]`, contiguous.
            k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, contiguous.
            block_tables: `[slots, max_blocks]` int32.
            slots: `[rows]` int32, the block table row of each query row.
            lengths: `[rows]` int32, cached tokens of each row, the new one included. The result of
                length 0 is zero. A negative length leaves the row of `out` unchanged.
            scale: multiplies the scores, usually `head_dim ** -0.5`; positive.
            scales: of caches in float8_e4m3fn; None for caches in the dtype of `q`.
            shared: prefixes that rows share. An implementation may read a prefix once for all its
                rows. The result is the same without them.
            plan: the result of `plan_decode` for these `lengths`, `shared` and `window`, or None.
            beside_prefill: True promises that the call before this one was `prefill_attention`
                with the same queries. Both may then run at the same time.
            window: number of last positions that the token sees, its own included; None for all.
                With a window, prefixes in `shared` may be read once for each row.
            soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
            sinks: `[query_heads]` or None, one more score of each head, without a position. It is
                only added to the sum of the softmax (Xiao et al., 2023, "Efficient Streaming
                Language Models with Attention Sinks", and OpenAI's gpt-oss).
            out: `[rows, query_heads, head_dim]` to write to, or None for a new tensor.

        Returns:
            `[rows, query_heads, head_dim]` in the dtype of `q`: `out` if given.

        Raises:
            ValueError: the implementation cannot read tensors of this layout.
        """

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        scale: float,
        max_query_length: int,
        *,
        scales: KVScales | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend causally from each chunk to its cached prefix and to itself.

        Query j of chunk i has position `lengths[i] - (query_starts[i+1] - query_starts[i]) + j` in
        its sequence. It sees all positions up to its own, or only the last `window` positions.

        Args:
            q: `[tokens, query_heads, head_dim]`, contiguous: the chunks one after another. Tokens
                without a chunk may precede and follow the chunks.
            k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, contiguous. The keys
                and values of the chunks are already written.
            block_tables: `[slots, max_blocks]` int32.
            slots: `[chunks]` int32.
            query_starts: `[chunks + 1]` int32, where each chunk begins in `q`, then the end of the
                last chunk.
            lengths: `[chunks]` int32, cached tokens after the chunk: prefix and chunk together. A
                chunk of length 0 is padding: its results are zero.
            scale: multiplies the scores, usually `head_dim ** -0.5`; positive.
            max_query_length: tokens of the longest chunk that is not padding, or more.
            scales, window, soft_cap, sinks: as in `decode_attention`.
            out: `[tokens, query_heads, head_dim]` to write to, or None for a new tensor.

        Returns:
            `[tokens, query_heads, head_dim]` in the dtype of `q`: `out` if given. Rows before the
            first chunk are left unchanged, rows after the last one are zero.

        Raises:
            ValueError: the implementation cannot read tensors of this layout.
        """
