"""Multi-head latent attention over the paged cache (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1).

The cache of a layer holds for each token one latent vector of `rank` values and one rotated key of
`rotated_dim` values: `[num_blocks, 1, block_size, rank + rotated_dim]`. Keys and values of a head
are products of the latent vector and matrices of the head, `up_k` and `up_v`. Attention never
computes them: it has the *absorbed* form. A query is multiplied by its head's `up_k` before
attention, and the result by `up_v` after it, because

    q . (up_k c) = (up_k^T q) . c        sum_i w_i (up_v c_i) = up_v (sum_i w_i c_i)

So all query heads of a token attend to the same vectors: scores are `absorbed . c + rotated . k`,
and the result of a head is a weighted sum of latent vectors.

Cached values must be finite wherever a block table points, as `contract.attention` says.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class LatentOps(Protocol):
    """The operations of a layer with latent attention, in the order in which they run."""

    def latent_rope_kv_write(
        self,
        q: Tensor,
        latent: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        cache: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries, and write normalized latent vectors and rotated keys to the cache.

        The last `rotated_dim` values of each query, and of `latent`, are rotated by the position of
        their token. The two halves of these values are the real and the imaginary parts. The first
        `rank` values of `latent` are RMS-normalized. Everything is computed in float32 and rounded
        once. A token is written to row `position % block_size` of block
        `block_tables[slot, position // block_size]`.

        Args:
            q: `[tokens, heads, query_dim]`, heads and values contiguous; rows of any stride.
            latent: `[tokens, rank + rotated_dim]`, rows of any stride.
            norm: `[rank]`.
            eps: added to the mean square.
            cos_sin: `[max_positions, rotated_dim]` float32, cosines in the first half of a row and
                sines in the second.
            positions, slots: `[tokens]` int32. Tokens of the padding slot write to scratch block 0.
            block_tables: `[slots, max_blocks]` int32.
            cache: `[num_blocks, 1, block_size, rank + rotated_dim]`, contiguous, written in place.
            out: `[tokens, heads, query_dim]`, contiguous, or None for a new tensor. It may be `q`.

        Returns:
            The queries, `[tokens, heads, query_dim]`: `out` if given.
        """

    def multiply_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of each head of `x` and a matrix of its own.

        Args:
            x: `[tokens, heads, in_features]`, of any strides.
            weight: `[heads, in_features, out_features]`, of any strides.

        Returns:
            `[tokens, heads, out_features]` in the dtype of `x`, contiguous.
        """

    def plan_latent_decode(self, lengths: Tensor, heads: int, rank: int, dtype: torch.dtype) -> Any:
        """Return the `plan` of `latent_decode_attention` for these lengths.

        Args:
            lengths: `[rows]` int32, as in `latent_decode_attention`.
            heads: query heads of a layer.
            rank: values of a latent vector.
            dtype: of queries and cache.

        Returns:
            A value private to the implementation, valid until `lengths` change, or None if the
            implementation needs no plan.
        """

    def latent_decode_attention(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        *,
        plan: Any = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend from one new token of each sequence to its cached tokens.

        Args:
            absorbed: `[rows, heads, rank]`, contiguous: queries multiplied by `up_k`.
            rotated: `[rows, heads, rotated_dim]`, the rotated values of the queries; rows and heads
                of any stride.
            cache: `[num_blocks, 1, block_size, rank + rotated_dim]`, contiguous.
            block_tables: `[slots, max_blocks]` int32.
            slots: `[rows]` int32, the block table row of each query row.
            lengths: `[rows]` int32, cached tokens of each row, the new one included. The result of
                length 0 is zero. A negative length leaves the row of `out` unchanged.
            scale: multiplies the scores; positive.
            plan: the result of `plan_latent_decode` for these `lengths`, or None.
            out: `[rows, heads, rank]` to write to, contiguous, or None for a new tensor.

        Returns:
            `[rows, heads, rank]` in the dtype of `absorbed`: `out` if given.

        Raises:
            ValueError: the implementation cannot read tensors of this layout.
        """

    def latent_prefill_attention(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        scale: float,
        max_query_length: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend causally from each chunk to its cached prefix and to itself.

        Args:
            absorbed, rotated, cache, block_tables: as in `latent_decode_attention`, with tokens for
                rows. The chunks are already in the cache.
            slots, query_starts, lengths, scale, max_query_length: as in
                `AttentionOps.prefill_attention`.
            out: `[tokens, heads, rank]` to write to, contiguous, or None for a new tensor.

        Returns:
            `[tokens, heads, rank]` in the dtype of `absorbed`: `out` if given. Rows before the
            first chunk are left unchanged, rows after the last one are zero.

        Raises:
            ValueError: the implementation cannot read tensors of this layout.
        """
